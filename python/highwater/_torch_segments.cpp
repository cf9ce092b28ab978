// The segments of PyTorch's allocator of device memory. `highwater/torch.py` compiles it for the installed PyTorch.

#include <c10/cuda/CUDACachingAllocator.h>

#include <cstddef>
#include <cstdint>
#include <exception>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace allocator = c10::cuda::CUDACachingAllocator;

// Returns the start of the segment in which the block of PyTorch at an address lies. Returns 0 if no block begins there.
EXPORT uint64_t highwater_segment_of(uint64_t address) {
  try {
    size_t size = 0;
    return reinterpret_cast<uint64_t>(allocator::getBaseAllocation(reinterpret_cast<void*>(address), &size));
  } catch (const std::exception&) {
    return 0;
  }
}

// Until the process ends, calls `freed` with the start of each segment before PyTorch frees it. PyTorch holds a lock meanwhile, so `freed` must not
// call PyTorch, and must not take Python's lock. Returns whether the allocator reports segments.
EXPORT bool highwater_watch_segments(void (*freed)(uint64_t address)) {
  try {
    allocator::attachAllocatorTraceTracker([freed](const allocator::TraceEntry& entry) {
      if (entry.action_ == allocator::TraceEntry::SEGMENT_FREE) {
        freed(static_cast<uint64_t>(entry.addr_));
      }
    });
    return true;
  } catch (const std::exception&) {
    return false;
  }
}
