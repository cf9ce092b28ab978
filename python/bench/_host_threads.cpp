// Threads that allocate page-locked memory through PyTorch's allocator, for torch_host_table.py.
#include <ATen/core/CachingHostAllocator.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <thread>
#include <vector>

extern "C" __attribute__((visibility("default"))) double nanoseconds_per_pair(int threads, std::size_t bytes, int pairs) {
  auto* allocator = at::getHostAllocator(at::kCUDA);
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<double> times(threads);
  std::vector<std::thread> all;
  for (int thread = 0; thread < threads; ++thread) {
    all.emplace_back([&, thread] {
      for (int warm = 0; warm < 100; ++warm) (void)allocator->allocate(bytes);
      ++ready;
      while (!go) {}
      auto begin = std::chrono::steady_clock::now();
      for (int pair = 0; pair < pairs; ++pair) (void)allocator->allocate(bytes);
      times[thread] = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() / pairs;
    });
  }
  while (ready != threads) {}
  go = true;
  double sum = 0;
  for (int thread = 0; thread < threads; ++thread) {
    all[thread].join();
    sum += times[thread];
  }
  return sum / threads;
}
