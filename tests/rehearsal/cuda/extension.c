/* transformer_engine_torch, as a shared library, because Transformer Engine looks for one: what is in it is the Python
   module tests.rehearsal.extension. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "transformer_engine_torch", NULL, -1, NULL};

PyMODINIT_FUNC PyInit_transformer_engine_torch(void) {
  PyObject* module = PyModule_Create(&definition);
  PyObject* contents = module ? PyImport_ImportModule("tests.rehearsal.extension") : NULL;
  if (!contents) return NULL;
  PyDict_Update(PyModule_GetDict(module), PyModule_GetDict(contents));
  return module;
}
