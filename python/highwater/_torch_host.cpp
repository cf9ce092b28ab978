// PyTorch's allocator of page-locked memory, over Highwater's pool. `highwater/torch.py` compiles it for the installed PyTorch.
//
// The library of the package has the functions. They throw nothing and return no references of C++.

#include <ATen/core/CachingHostAllocator.h>

#include <array>
#include <cstdint>

namespace {

struct Functions {
  // Returns the most bytes of a block. PyTorch copies a tensor by one call, which must not cross the border of a registration.
  size_t (*largest)();
  // Returns a block, and writes its address. Null after an error.
  void* (*allocate)(size_t bytes, void** address);
  void (*release)(void* block);
  // Notes that the work of a stream so far uses memory. 1 if it is noted, 0 for memory of another allocator, -1 after an error.
  int32_t (*used)(void* address, int32_t device, void* stream);
  // 0, or -1 after an error.
  int32_t (*trim)();
  // Blocks in use and their bytes, pieces held and their bytes, and the most bytes held so far.
  void (*statistics)(uint64_t* five);
  // Writes the text of the last error, at most `length` bytes with a 0 at the end.
  void (*failure)(char* text, size_t length);
};

class Allocator final : public at::HostAllocator {
 public:
  Allocator(const Functions& functions, at::HostAllocator* before)
      : functions_(functions), largest_(functions.largest()), before_(before) {}

  at::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, nullptr, nullptr, at::DeviceType::CPU};
    }
    if (bytes > largest_) {
      return before_->allocate(bytes);
    }
    void* address = nullptr;
    void* block = functions_.allocate(bytes, &address);
    TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, "page-locked memory: ", failure());
    return {address, block, functions_.release, at::DeviceType::CPU};
  }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }

  bool record_event(void* address, void* context, c10::Stream stream) override {
    const int32_t noted = functions_.used(address, stream.device_index(), stream.native_handle());
    if (noted == 0) {
      // Memory that is too large or was allocated before the installation, or memory of other code.
      return before_->record_event(address, context, stream);
    }
    if (noted < 0) {
      TORCH_WARN_ONCE("Page-locked memory is not reused, because the end of its use is unknown: ", failure());
    }
    return true;
  }

  void empty_cache() override {
    if (functions_.trim() != 0) {
      TORCH_WARN_ONCE("Idle page-locked memory was not freed: ", failure());
    }
    before_->empty_cache();
  }

  at::HostStats get_stats() override {
    std::array<uint64_t, 5> found{};
    functions_.statistics(found.data());
    at::HostStats stats;
    stats.active_requests.current = static_cast<int64_t>(found[0]);
    stats.active_bytes.current = static_cast<int64_t>(found[1]);
    stats.allocations.current = static_cast<int64_t>(found[2]);
    stats.allocated_bytes.current = static_cast<int64_t>(found[3]);
    stats.allocated_bytes.peak = static_cast<int64_t>(found[4]);
    return stats;
  }

  // Highwater's counts are not reset.
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  // Memory that a capture uses is not reused before the process ends, so no pool is needed for it.
  void begin_allocate_to_pool(c10::MempoolId_t, std::function<bool(c10::Stream)>) override {}
  void end_allocate_to_pool(c10::MempoolId_t) override {}
  void release_pool(c10::MempoolId_t) override {}

 private:
  std::string failure() const {
    std::array<char, 512> text{};
    functions_.failure(text.data(), text.size());
    return text.data();
  }

  Functions functions_;
  size_t largest_;
  at::HostAllocator* before_;
};

}  // namespace

// Installs the allocator for the rest of the process. Another thread must not allocate meanwhile. Returns whether this PyTorch has an
// allocator for CUDA.
extern "C" __attribute__((visibility("default"))) bool highwater_install_host_allocator(const Functions* functions) {
  try {
    at::HostAllocator* before = at::getHostAllocator(at::kCUDA);
    if (before == nullptr) {
      return false;
    }
    // PyTorch's own has the priority 0. This one is never destroyed: tensors live as long as the process.
    at::setHostAllocator(at::kCUDA, new Allocator(*functions, before), 1);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}
