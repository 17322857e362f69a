// Page-lock ranges of host memory that exist already (a mapped file, shared memory), so that copies run
// at the link's speed and kernels can read them.
//
// Each function returns a cudaError_t; an error leaves nothing behind for later calls to find.

#include <cstddef>
#include <cuda_runtime.h>

namespace {

int forget(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

}  // namespace

// [start, start + num_bytes): both multiples of the page size, or the pages' rest is pinned too
extern "C" int ft_register_host(void* start, size_t num_bytes) {
  return forget(
      cudaHostRegister(start, num_bytes, cudaHostRegisterMapped | cudaHostRegisterPortable));
}

// start: as it was registered
extern "C" int ft_unregister_host(void* start) { return forget(cudaHostUnregister(start)); }

// *device: where the present device sees `host`, an address within pinned memory
extern "C" int ft_device_pointer(const void* host, void** device) {
  cudaPointerAttributes attributes;
  const cudaError_t error = cudaPointerGetAttributes(&attributes, host);
  if (error != cudaSuccess) return forget(error);
  *device = attributes.devicePointer;
  return *device == nullptr ? cudaErrorInvalidHostPointer : cudaSuccess;
}

// The name of an error that any function here has returned; static.
extern "C" const char* ft_error_name(int error) {
  return cudaGetErrorName(static_cast<cudaError_t>(error));
}
