// Gather expert rows from mapped host memory into expert slots, inside a stream or CUDA graph.
//
// The lists of rows and their number live on the device, so the host neither waits nor relaunches:
// a launch is sized for `max_rows`, and blocks beyond `*num_rows` leave after one cached load.
// Rows are read over the link with 16-byte loads, neighbouring threads reading neighbouring words,
// which is what keeps PCIe read requests full-sized.
//
// Raw pointers, sizes and a stream; no torch headers. Builds for sm_80 and later.

#include <cstdint>
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // 16-byte loads in flight per thread

__global__ void __launch_bounds__(kThreads)
fetch_rows(const char* __restrict__ bank, char* __restrict__ slots,
           const int32_t* __restrict__ source_rows, const int32_t* __restrict__ slot_ids,
           const int32_t* __restrict__ num_rows, int64_t row_bytes) {
  const int row = blockIdx.y;
  if (row >= *num_rows) return;
  const int64_t num_words = row_bytes / 16;
  const auto* source = reinterpret_cast<const uint4*>(bank + source_rows[row] * row_bytes);
  auto* target = reinterpret_cast<uint4*>(slots + slot_ids[row] * row_bytes);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t word = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (; word + (kUnroll - 1) * stride < num_words; word += kUnroll * stride) {
    uint4 held[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) held[i] = __ldcs(source + word + i * stride);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) target[word + i * stride] = held[i];
  }
  for (; word < num_words; word += stride) target[word] = __ldcs(source + word);
}

}  // namespace

// bank: mapped host rows as the device sees them · slots: device rows · both 16-byte aligned
// source_rows, slot_ids: [max_rows] int32 device · num_rows: int32 device, at most max_rows
// row_bytes: a multiple of 16 · returns a cudaError_t (1, invalid value, for sizes as said)
extern "C" int ft_fetch_rows(const void* bank, void* slots, const int32_t* source_rows,
                             const int32_t* slot_ids, const int32_t* num_rows, int64_t row_bytes,
                             int32_t max_rows, int32_t blocks_per_row, void* stream) {
  if (row_bytes <= 0 || row_bytes % 16 != 0 || max_rows < 0 || max_rows > 65535 ||
      blocks_per_row < 1) {
    return cudaErrorInvalidValue;
  }
  if (max_rows == 0) return cudaSuccess;
  const dim3 grid(blocks_per_row, max_rows);
  fetch_rows<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const char*>(bank), static_cast<char*>(slots), source_rows, slot_ids, num_rows,
      row_bytes);
  return cudaGetLastError();
}
