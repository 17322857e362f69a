// Runs every function of cuda/ on small memory and looks at what it did: a program for
// compute-sanitizer, which finds reads and writes out of bounds, races, and uninitialised reads.
// Built and run by test_sanitizer.py. Ends with 0 if all is right.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <vector>

extern "C" {
int ft_check_device();
int ft_fetch_rows(const void* bank, void* pool, const int32_t* experts, const int32_t* rows,
                  const int32_t* num_rows, int64_t row_bytes, int32_t chunk_bytes,
                  int32_t num_blocks, int32_t unroll, void* stream);
int ft_copy_rows(const void* const* sources, void* const* targets, int64_t num_rows,
                 int64_t row_bytes, void* stream);
int ft_register_host(void* start, size_t num_bytes);
int ft_unregister_host(void* start);
int ft_device_pointer(const void* host, void** device);
const char* ft_error_name(int error);
}

namespace {

constexpr int kExperts = 7;
constexpr int kRows = 9;
constexpr size_t kPage = 4096;

void check(int error, const char* what) {
  if (error == 0) return;
  std::fprintf(stderr, "%s: %s\n", what, ft_error_name(error));
  std::exit(1);
}

#define CHECK(call) check(static_cast<int>(call), #call)

void require(bool holds, const char* what, int64_t row_bytes, int unroll, int count) {
  if (holds) return;
  std::fprintf(stderr, "%s: row_bytes %lld, unroll %d, %d rows\n", what,
               static_cast<long long>(row_bytes), unroll, count);
  std::exit(1);
}

// A bank in pages of its own, a pool, and the lists of what goes where.
struct Case {
  int64_t row_bytes;
  size_t bank_bytes;
  char* bank;
  void* mapped;
  char* pool;
  int32_t* lists;  // experts, rows, number

  explicit Case(int64_t bytes) : row_bytes(bytes) {
    bank_bytes = (kExperts * row_bytes + kPage - 1) / kPage * kPage;
    bank = static_cast<char*>(std::aligned_alloc(kPage, bank_bytes));
    for (size_t i = 0; i < bank_bytes; ++i) bank[i] = static_cast<char>(i * 131 + i / 4096);
    CHECK(ft_register_host(bank, bank_bytes));
    CHECK(ft_device_pointer(bank, &mapped));
    CHECK(cudaMalloc(&pool, kRows * row_bytes));
    CHECK(cudaMalloc(&lists, (2 * kExperts + 1) * sizeof(int32_t)));
  }

  ~Case() {
    CHECK(cudaFree(lists));
    CHECK(cudaFree(pool));
    CHECK(ft_unregister_host(bank));
    std::free(bank);
  }

  // Expert (3 i + 1) mod 7 to row 8 - i, for i < count; everything else stays 0x55.
  void fetch(int count, int unroll, int32_t chunk_bytes, int num_blocks) {
    std::vector<int32_t> list(2 * kExperts + 1);
    for (int i = 0; i < kExperts; ++i) {
      list[i] = (3 * i + 1) % kExperts;
      list[kExperts + i] = kRows - 1 - i;
    }
    list[2 * kExperts] = count;
    CHECK(cudaMemcpy(lists, list.data(), list.size() * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemset(pool, 0x55, kRows * row_bytes));
    CHECK(ft_fetch_rows(mapped, pool, lists, lists + kExperts, lists + 2 * kExperts, row_bytes,
                        chunk_bytes, num_blocks, unroll, nullptr));
    CHECK(cudaDeviceSynchronize());
    compare(count, unroll, list);
  }

  void compare(int count, int unroll, const std::vector<int32_t>& list) {
    std::vector<char> got(kRows * row_bytes);
    CHECK(cudaMemcpy(got.data(), pool, got.size(), cudaMemcpyDeviceToHost));
    std::vector<char> want(got.size(), 0x55);
    for (int i = 0; i < count; ++i) {
      std::memcpy(&want[list[kExperts + i] * row_bytes], &bank[list[i] * row_bytes], row_bytes);
    }
    require(got == want, "fetch", row_bytes, unroll, count);
  }

  // Rows 1 and 2, which follow each other, and 5; then one of them within the device.
  void copy() {
    std::vector<const void*> sources = {bank + row_bytes, bank + 2 * row_bytes,
                                        bank + 5 * row_bytes};
    std::vector<void*> targets = {pool, pool + row_bytes, pool + 3 * row_bytes};
    CHECK(ft_copy_rows(sources.data(), targets.data(), 3, row_bytes, nullptr));
    const void* inside = pool + row_bytes;
    void* behind = pool + 4 * row_bytes;
    CHECK(ft_copy_rows(&inside, &behind, 1, row_bytes, nullptr));
    CHECK(ft_copy_rows(nullptr, nullptr, 0, row_bytes, nullptr));
    CHECK(cudaDeviceSynchronize());
    const int from[] = {1, 2, 5, 2}, to[] = {0, 1, 3, 4};
    std::vector<char> got(row_bytes);
    for (int i = 0; i < 4; ++i) {
      CHECK(cudaMemcpy(got.data(), pool + to[i] * row_bytes, row_bytes, cudaMemcpyDeviceToHost));
      require(std::memcmp(got.data(), bank + from[i] * row_bytes, row_bytes) == 0, "copy",
              row_bytes, 0, i);
    }
  }
};

}  // namespace

int main() {
  CHECK(ft_check_device());
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  // Less than a chunk, a chunk, and several with a rest.
  for (const int64_t row_bytes : {int64_t{16}, int64_t{256}, int64_t{32768}, int64_t{70160}}) {
    Case one(row_bytes);
    for (const int unroll : {0, 1, 2, 4, 8}) {
      if (unroll == 0 && properties.major < 9) continue;
      for (const int count : {0, 1, kExperts}) {
        for (const int num_blocks : {1, 5, 64}) one.fetch(count, unroll, 32768, num_blocks);
      }
    }
    one.copy();
  }
  if (ft_fetch_rows(nullptr, nullptr, nullptr, nullptr, nullptr, 24, 16, 1, 1, nullptr) == 0) {
    std::fprintf(stderr, "rows of 24 bytes were not refused\n");
    return 1;
  }
  std::puts("right");
  return 0;
}
