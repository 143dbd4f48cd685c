/* libcuda.so.1 of the GPU that is not there; build.py adds a function that returns 0 for every other symbol. */
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = 1;
  return 0;
}
int cuDeviceGet(int* device, int index) {
  *device = index;
  return 0;
}
int cuDeviceGetName(char* out, int size, int device) {
  const char* name = "Fake H100";
  int i = 0;
  for (; name[i] && i < size - 1; i++) out[i] = name[i];
  out[i] = 0;
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {
    case 75: *value = 9; break;       /* compute capability, major */
    case 16: *value = 132; break;     /* multiprocessors */
    case 10: *value = 32; break;      /* warp */
    case 97: *value = 232448; break;  /* shared memory a block may opt into */
    default: *value = 0;
  }
  return 0;
}
int cuDeviceTotalMem_v2(unsigned long* bytes, int device) {
  *bytes = 80ul << 30;
  return 0;
}
int cuCtxGetCurrent(void** context) {
  *context = (void*)1;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) { return cuCtxGetCurrent(context); }
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
int cuGetErrorString(int error, const char** text) {
  *text = "fake CUDA driver";
  return 0;
}
int cuGetErrorName(int error, const char** text) { return cuGetErrorString(error, text); }
