// A GPU that is not there: so much of the CUDA runtime that torch, Transformer Engine and megatron-core believe in one
// H100, build models on it and run every line around the kernels. Kernels do nothing. "Device memory" is host memory
// (reserved, committed when written), so copies are real copies and host code can look inside.
// LD_PRELOADed before anything loads libcudart; build.py adds a function that returns 0 for every other symbol.
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {

std::mutex guard;
std::map<uintptr_t, size_t> blocks, pinned;  // of the device; of the host, page-locked
size_t used = 0;
thread_local int current = 0;

size_t total_bytes() {
  const char* given = getenv("FAKE_CUDA_GIB");
  return static_cast<size_t>(given ? atoi(given) : 80) << 30;
}

int device_count() {
  const char* given = getenv("FAKE_CUDA_DEVICES");
  return given ? atoi(given) : 1;
}

// Streams, events and library handles: any number that is not null.
uintptr_t next_handle() {
  static uintptr_t handle = 0x1000;
  return __atomic_add_fetch(&handle, 16, __ATOMIC_SEQ_CST);
}

cudaError_t allocate(void** out, size_t bytes) {
  *out = nullptr;
  if (bytes == 0) return cudaSuccess;
  std::lock_guard<std::mutex> lock(guard);
  if (used + bytes > total_bytes()) return cudaErrorMemoryAllocation;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return cudaErrorMemoryAllocation;
  blocks[reinterpret_cast<uintptr_t>(memory)] = bytes;
  used += bytes;
  *out = memory;
  return cudaSuccess;
}

cudaError_t release(void* memory) {
  if (memory == nullptr) return cudaSuccess;
  std::lock_guard<std::mutex> lock(guard);
  auto found = blocks.find(reinterpret_cast<uintptr_t>(memory));
  if (found == blocks.end()) return cudaErrorInvalidValue;
  munmap(memory, found->second);
  used -= found->second;
  blocks.erase(found);
  return cudaSuccess;
}

bool within(const std::map<uintptr_t, size_t>& ranges, const void* pointer) {
  std::lock_guard<std::mutex> lock(guard);
  auto at = reinterpret_cast<uintptr_t>(pointer);
  auto after = ranges.upper_bound(at);
  if (after == ranges.begin()) return false;
  --after;
  return at < after->first + after->second;
}
bool on_device(const void* pointer) { return within(blocks, pointer); }

cudaError_t copy(void* to, const void* from, size_t bytes) {
  memmove(to, from, bytes);
  return cudaSuccess;
}

long long nothing() { return 0; }

}  // namespace

extern "C" {

// ------------------------------------------------------------------------------------------------------- the device

cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return *count ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
  current = device;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Fake H100");
  p->totalGlobalMem = total_bytes();
  p->major = 9;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->maxBlocksPerMultiProcessor = 32;
  p->l2CacheSize = 50 << 20;
  for (int i = 0; i < 3; i++) {
    p->maxThreadsDim[i] = 1024;
    p->maxGridSize[i] = 2147483647;
  }
  p->unifiedAddressing = p->cooperativeLaunch = p->concurrentKernels = p->canMapHostMemory = 1;
  p->textureAlignment = 512;
  p->totalConstMem = 65536;
  p->asyncEngineCount = 3;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* out, int size, int device) {
  snprintf(out, size, "0000:%02x:00.0", device);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  *free_bytes = total_bytes() - used;
  *total = total_bytes();
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t) { return "fake CUDA"; }
const char* cudaGetErrorString(cudaError_t error) { return error ? "an error of the fake CUDA runtime" : "no error"; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }

// ----------------------------------------------------------------------------------------------------------- memory

cudaError_t cudaMalloc(void** out, size_t bytes) { return allocate(out, bytes); }
cudaError_t cudaMallocAsync(void** out, size_t bytes, cudaStream_t) { return allocate(out, bytes); }
cudaError_t cudaFree(void* memory) { return release(memory); }
cudaError_t cudaFreeAsync(void* memory, cudaStream_t) { return release(memory); }
cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  if (posix_memalign(out, 4096, bytes ? bytes : 1)) return cudaErrorMemoryAllocation;
  std::lock_guard<std::mutex> lock(guard);
  pinned[reinterpret_cast<uintptr_t>(*out)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }
cudaError_t cudaFreeHost(void* memory) {
  std::lock_guard<std::mutex> lock(guard);
  pinned.erase(reinterpret_cast<uintptr_t>(memory));
  free(memory);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* pointer) {
  memset(out, 0, sizeof *out);
  out->type = on_device(pointer)         ? cudaMemoryTypeDevice
              : within(pinned, pointer) ? cudaMemoryTypeHost
                                        : cudaMemoryTypeUnregistered;
  out->device = current;
  out->devicePointer = out->hostPointer = const_cast<void*>(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) { return copy(to, from, bytes); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return copy(to, from, bytes);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
  return copy(to, from, bytes);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t) {
  for (size_t i = 0; i < height; i++) {
    memmove(static_cast<char*>(to) + i * to_pitch, static_cast<const char*>(from) + i * from_pitch, width);
  }
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) { return cudaMemset(to, value, bytes); }

// ----------------------------------------------------------------------------------------------- streams and events

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = reinterpret_cast<cudaStream_t>(next_handle());
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = reinterpret_cast<cudaEvent_t>(next_handle());
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1.0f;
  return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------------------- kernels

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  out->binaryVersion = out->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks_out, const void*, int, size_t) {
  *blocks_out = 4;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks_out, const void*, int, size_t,
                                                                   unsigned) {
  *blocks_out = 4;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*) {
  *clusters = 16;
  return cudaSuccess;
}
void** __cudaRegisterFatBinary(void*) { return reinterpret_cast<void**>(next_handle()); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = *block = dim3{1, 1, 1};
  *shared = 0;
  *static_cast<void**>(stream) = nullptr;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(nothing);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void** out, const void*) {
  static char space[4096];
  *out = space;
  return cudaSuccess;
}

// -------------------------------------------------------------------------------------------------------- libraries

int cublasCreate_v2(void** handle) {
  *handle = reinterpret_cast<void*>(next_handle());
  return 0;
}
int cublasLtCreate(void** handle) { return cublasCreate_v2(handle); }
int cudnnCreate(void** handle) { return cublasCreate_v2(handle); }
int cusparseCreate(void** handle) { return cublasCreate_v2(handle); }
int cusolverDnCreate(void** handle) { return cublasCreate_v2(handle); }
const char* cublasGetStatusString(int) { return "fake cuBLAS"; }
const char* cublasLtGetStatusString(int) { return "fake cuBLASLt"; }
const char* cudnnGetErrorString(int) { return "fake cuDNN"; }
int cublasGetVersion_v2(void*, int* version) {
  *version = 130100;
  return 0;
}
size_t cublasLtGetVersion(void) { return 130100; }
size_t cublasLtGetCudartVersion(void) { return 13000; }
int cublasGetMathMode(void*, int* mode) {
  *mode = 0;
  return 0;
}
int cublasGetPointerMode_v2(void*, int* mode) {
  *mode = 0;
  return 0;
}
int cublasGetStream_v2(void*, void** stream) {
  *stream = nullptr;
  return 0;
}
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* results, int* found) {
  memset(results, 0, 64 + 8 + 4 + 4 + 16);  // algo, workspaceSize, state, wavesCount, reserved
  *found = 1;
  return 0;
}
int ncclGetVersion(int* version) {
  *version = 23007;
  return 0;
}
// Collectives are gloo's (on_host.py). Whoever asks NCCL itself for a communicator hears that there is none.
int ncclCommInitRank(void**, int, void*, int) { return 5; }
int ncclCommInitRankConfig(void**, int, void*, int, void*) { return 5; }
int ncclCommInitRankScalable(void**, int, int, int, void*, void*) { return 5; }
const char* ncclGetErrorString(int) { return "the fake NCCL moves nothing: gloo stands in for it"; }
const char* ncclGetLastError(void*) { return ""; }

}  // extern "C"
