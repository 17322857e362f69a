// Gather expert rows from mapped host memory into the pool, inside a stream or CUDA graph.
//
// The lists of rows and their number live on the device, so the host neither waits nor relaunches. A
// fixed number of blocks shares the chunks of all rows; with no rows each leaves after one load. Reads
// over the link are 16 bytes a thread, neighbouring threads reading neighbouring words, several
// independent ones in flight per thread. The other variant lets the copy unit of sm_90 and later read
// whole stages into shared memory.
//
// Raw pointers, sizes and a stream; no torch headers. Builds for sm_80 and later.

#include <cstdint>
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 256;
// Of the staged variant, in bytes and number; two blocks fit on an SM.
constexpr int kStageBytes = 16384;
constexpr int kStages = 6;

struct Rows {
  const char* bank;
  char* pool;
  const int32_t* experts;
  const int32_t* rows;
  int64_t row_bytes;
  int32_t chunk_bytes;

  __device__ int32_t chunks() const {
    return static_cast<int32_t>((row_bytes + chunk_bytes - 1) / chunk_bytes);
  }
  // Chunk `item` of all chunks: where it starts in bank and pool, and its length.
  __device__ int32_t locate(int32_t item, int32_t num_chunks, const char** source,
                            char** target) const {
    const int32_t i = item / num_chunks;
    const int64_t start = static_cast<int64_t>(item - i * num_chunks) * chunk_bytes;
    *source = bank + experts[i] * row_bytes + start;
    *target = pool + rows[i] * row_bytes + start;
    const int64_t left = row_bytes - start;
    return left < chunk_bytes ? static_cast<int32_t>(left) : chunk_bytes;
  }
};

template <int kUnroll>
__global__ void __launch_bounds__(kThreads)
fetch_words(Rows rows, const int32_t* __restrict__ num_rows) {
  const int32_t num_chunks = rows.chunks();
  const int32_t num_items = *num_rows * num_chunks;
  for (int32_t item = blockIdx.x; item < num_items; item += gridDim.x) {
    const char* from;
    char* to;
    const int32_t num_words = rows.locate(item, num_chunks, &from, &to) / 16;
    const auto* source = reinterpret_cast<const uint4*>(from);
    auto* target = reinterpret_cast<uint4*>(to);
    int32_t word = threadIdx.x;
    for (; word + (kUnroll - 1) * kThreads < num_words; word += kUnroll * kThreads) {
      uint4 held[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) held[i] = __ldcs(source + word + i * kThreads);
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) target[word + i * kThreads] = held[i];
    }
    for (; word < num_words; word += kThreads) target[word] = __ldcs(source + word);
  }
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define FT_HAS_BULK_COPIES 1
#endif

#ifdef FT_HAS_BULK_COPIES
__device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void start_read(char* stage, const char* source, int32_t num_bytes, uint64_t* arrived) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(arrived)),
               "r"(num_bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(stage)),
      "l"(source), "r"(num_bytes), "r"(shared_address(arrived))
      : "memory");
}

__device__ void await_read(uint64_t* arrived, uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}\n" ::"r"(shared_address(arrived)),
      "r"(phase)
      : "memory");
}

__device__ void start_write(char* target, const char* stage, int32_t num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
               "r"(shared_address(stage)), "r"(num_bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
#endif

// One thread drives kStages copies in turn; chunk_bytes is kStageBytes.
__global__ void __launch_bounds__(32) fetch_stages(Rows rows, const int32_t* __restrict__ num_rows) {
#ifdef FT_HAS_BULK_COPIES
  extern __shared__ __align__(128) char stages[];
  __shared__ uint64_t arrived[kStages];
  const int32_t num_chunks = rows.chunks();
  const int32_t num_items = *num_rows * num_chunks;
  if (threadIdx.x != 0 || static_cast<int32_t>(blockIdx.x) >= num_items) return;
  for (int i = 0; i < kStages; ++i) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&arrived[i])));
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  const char* source;
  char* target;
  int32_t read = blockIdx.x;
  for (int i = 0; i < kStages - 1 && read < num_items; ++i, read += gridDim.x) {
    const int32_t num_bytes = rows.locate(read, num_chunks, &source, &target);
    start_read(stages + i * kStageBytes, source, num_bytes, &arrived[i]);
  }
  int stage = 0;
  uint32_t phase = 0;
  for (int32_t item = blockIdx.x; item < num_items; item += gridDim.x) {
    await_read(&arrived[stage], phase);
    const int32_t num_bytes = rows.locate(item, num_chunks, &source, &target);
    start_write(target, stages + stage * kStageBytes, num_bytes);
    if (read < num_items) {
      // The stage before this one is read into next: its write, the last but one, must have left it.
      const int next = stage == 0 ? kStages - 1 : stage - 1;
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      const int32_t length = rows.locate(read, num_chunks, &source, &target);
      start_read(stages + next * kStageBytes, source, length, &arrived[next]);
      read += gridDim.x;
    }
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

}  // namespace

// bank: mapped host rows as the device sees them · pool: device rows · both 16-byte aligned
// experts, rows: [≥ *num_rows] int32 device, bank row i goes to pool row i · num_rows: int32 device
// row_bytes, chunk_bytes: multiples of 16 · num_chunks of all rows below 2³¹
// unroll: 16-byte loads in flight per thread, 1, 2, 4 or 8; 0: the variant of sm_90 and later, which
// ignores chunk_bytes · returns a cudaError_t (1, invalid value, for sizes as said)
extern "C" int ft_fetch_rows(const void* bank, void* pool, const int32_t* experts,
                             const int32_t* rows, const int32_t* num_rows, int64_t row_bytes,
                             int32_t chunk_bytes, int32_t num_blocks, int32_t unroll,
                             void* stream) {
  if (row_bytes <= 0 || row_bytes % 16 != 0 || chunk_bytes <= 0 || chunk_bytes % 16 != 0 ||
      num_blocks < 1) {
    return cudaErrorInvalidValue;
  }
  Rows what{static_cast<const char*>(bank), static_cast<char*>(pool), experts, rows, row_bytes,
            chunk_bytes};
  const auto on = static_cast<cudaStream_t>(stream);
  switch (unroll) {
    case 0: {
      int device, major;
      cudaGetDevice(&device);
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
      if (major < 9) return cudaErrorNotSupported;
      what.chunk_bytes = kStageBytes;
      constexpr int kBytes = kStages * kStageBytes;
      const cudaError_t error = cudaFuncSetAttribute(
          fetch_stages, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      if (error != cudaSuccess) return error;
      fetch_stages<<<num_blocks, 32, kBytes, on>>>(what, num_rows);
      break;
    }
    case 1:
      fetch_words<1><<<num_blocks, kThreads, 0, on>>>(what, num_rows);
      break;
    case 2:
      fetch_words<2><<<num_blocks, kThreads, 0, on>>>(what, num_rows);
      break;
    case 4:
      fetch_words<4><<<num_blocks, kThreads, 0, on>>>(what, num_rows);
      break;
    case 8:
      fetch_words<8><<<num_blocks, kThreads, 0, on>>>(what, num_rows);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

// 0 when this library has code for the present device; else a cudaError_t.
extern "C" int ft_check_device() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, fetch_words<4>);
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}
