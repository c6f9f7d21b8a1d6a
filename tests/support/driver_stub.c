// In the place of libcuda.so.1: what Triton's launcher calls, for kernels that are compiled and never run.
//
// A tensor map holds what it was asked for, in plain numbers; a launch hands its parameters to `observe`, if set.

#include <cuda.h>
#include <string.h>

static int capability;
static void (*observe)(CUfunction, void **, unsigned, unsigned, CUstream);
static uintptr_t num_functions;

void stub_set(int compute_capability, void (*observer)(CUfunction, void **, unsigned, unsigned, CUstream)) {
  capability = compute_capability;
  observe = observer;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra) {
  if (observe)
    observe(f, params, config->gridDimX, config->gridDimY, config->hStream);
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *shape,
    const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  cuuint64_t *words = (cuuint64_t *)map; // 16 of 64 bits
  memset(map, 0, sizeof *map);
  words[0] = (cuuint64_t)address;
  words[1] = type | rank << 8 | interleave << 16 | swizzle << 20 | promotion << 24 | fill << 28;
  for (cuuint32_t i = 0; i < rank; i++) {
    words[2 + i] = shape[i];
    words[7 + i] = i + 1 < rank ? strides[i] : 0;
    words[12 + i / 2] |= (cuuint64_t)box[i] << 32 * (i % 2);
  }
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) {
  *f = (CUfunction)++num_functions;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)1;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction f) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = capability == 90 ? 232448 : 166912; // bytes of shared memory: the one attribute that decides anything
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "the stub of the driver does not do this";
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
  *version = 13020;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) { return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *config) { return CUDA_SUCCESS; }
