// A memory resource of RMM over Highwater: device memory from the pools of streams. Copy it into a program.
//
// RMM up to 26.4 has the base class `device_memory_resource`; later versions have the concept `cuda::mr::resource`. The class has both.
//
// In RMM's contract, work on the stream of a deallocation comes after all other uses of the memory. So the resource notes that stream, too,
// and Highwater reuses the memory after its work. The streams must live until the resource is destroyed. The per-thread default stream is refused.
#pragma once

#include <highwater/highwater.h>

#include <rmm/error.hpp>
#include <rmm/resource_ref.hpp>

#if __has_include(<rmm/mr/device_memory_resource.hpp>)
#include <rmm/mr/device_memory_resource.hpp>
#define HIGHWATER_RMM_HAS_BASE 1
#else
#define HIGHWATER_RMM_HAS_BASE 0
#endif

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace highwater {

/// Throws what RMM expects for a status that is not HIGHWATER_OK.
inline void check(highwater_status status) {
    if (status == HIGHWATER_ERROR_OUT_OF_MEMORY) {
        throw rmm::out_of_memory{highwater_last_error()};
    }
    if (status != HIGHWATER_OK) {
        throw rmm::bad_alloc{highwater_last_error()};
    }
}

/// Memory of one device. Any thread may use it.
class device_memory {
  public:
    device_memory(highwater_runtime *runtime, std::uint32_t ordinal) { check(highwater_device_get(runtime, ordinal, &device_)); }

    device_memory(device_memory const &) = delete;
    device_memory &operator=(device_memory const &) = delete;

    /// Memory that is still allocated is freed once its streams are done.
    ~device_memory() {
        for (auto &[address, buffer] : buffers_) {
            highwater_buffer_release(&buffer);
        }
        for (auto &[raw, stream] : streams_) {
            highwater_stream_release(&stream);
        }
        highwater_device_release(&device_);
    }

    void *allocate(cudaStream_t stream, std::size_t bytes, std::size_t alignment) {
        if (bytes == 0) {
            return nullptr;
        }
        highwater_buffer *buffer = nullptr;
        std::uint64_t address = 0;
        highwater_stream *wrapped = wrap(stream);
        check(highwater_stream_allocate(wrapped, bytes, &buffer));
        auto status = highwater_buffer_address(buffer, &address);
        if (status == HIGHWATER_OK) {
            // Covers all kernels of this stream until the deallocation.
            status = highwater_buffer_used_on(buffer, wrapped);
        }
        if (status != HIGHWATER_OK || address % alignment != 0) {
            highwater_buffer_release(&buffer);
            check(status);
            throw rmm::bad_alloc{"the memory is aligned to less than " + std::to_string(alignment) + " bytes"};
        }
        std::lock_guard lock{mutex_};
        buffers_.emplace(address, buffer);
        return reinterpret_cast<void *>(address);
    }

    void deallocate(cudaStream_t stream, void *memory) noexcept {
        highwater_buffer *buffer = take(memory);
        if (buffer == nullptr) {
            return;
        }
        try {
            if (highwater_buffer_used_on(buffer, wrap(stream)) != HIGHWATER_OK) {
                return; // Kept: the end of its last use is unknown.
            }
        } catch (...) {
            return;
        }
        highwater_buffer_release(&buffer);
    }

    void synchronize(cudaStream_t stream) { check(highwater_stream_synchronize(wrap(stream))); }

    /// The caller has waited for all uses.
    void deallocate_unused(void *memory) noexcept {
        highwater_buffer *buffer = take(memory);
        highwater_buffer_release(&buffer);
    }

  private:
    /// Returns the handle of a stream. It is made once for each stream, and never under the lock.
    highwater_stream *wrap(cudaStream_t raw) {
        auto const number = reinterpret_cast<std::uint64_t>(raw);
        {
            std::lock_guard lock{mutex_};
            if (auto const found = streams_.find(number); found != streams_.end()) {
                return found->second;
            }
        }
        highwater_stream *made = nullptr;
        // 0 and 1 are the legacy default stream, and 2 is that of the thread.
        if (number == 2) {
            throw rmm::bad_alloc{"the per-thread default stream has other work in each thread; pass another stream"};
        }
        check(number <= 1 ? highwater_stream_legacy_default(device_, &made) : highwater_stream_wrap(device_, number, &made));
        highwater_stream *kept = nullptr;
        {
            std::lock_guard lock{mutex_};
            kept = streams_.emplace(number, made).first->second;
        }
        if (kept != made) {
            highwater_stream_release(&made); // Another thread made one meanwhile.
        }
        return kept;
    }

    highwater_buffer *take(void *memory) noexcept {
        std::lock_guard lock{mutex_};
        auto const found = buffers_.find(reinterpret_cast<std::uint64_t>(memory));
        if (found == buffers_.end()) {
            return nullptr;
        }
        highwater_buffer *buffer = found->second;
        buffers_.erase(found);
        return buffer;
    }

    highwater_device *device_ = nullptr;
    std::mutex mutex_;
    std::unordered_map<std::uint64_t, highwater_buffer *> buffers_;
    std::unordered_map<std::uint64_t, highwater_stream *> streams_;
};

/// The resource. Copies share the memory, as RMM expects.
class memory_resource final
#if HIGHWATER_RMM_HAS_BASE
    : public rmm::mr::device_memory_resource
#endif
{
  public:
    /// The program may release its runtime handle before the resource.
    memory_resource(highwater_runtime *runtime, std::uint32_t ordinal)
        : memory_{std::make_shared<device_memory>(runtime, ordinal)} {}

#if HIGHWATER_RMM_HAS_BASE
  private:
    void *do_allocate(std::size_t bytes, rmm::cuda_stream_view stream) override {
        return memory_->allocate(stream.value(), bytes, 256);
    }

    void do_deallocate(void *memory, std::size_t, rmm::cuda_stream_view stream) noexcept override {
        memory_->deallocate(stream.value(), memory);
    }

    [[nodiscard]] bool do_is_equal(rmm::mr::device_memory_resource const &other) const noexcept override {
        auto const *same = dynamic_cast<memory_resource const *>(&other);
        return same != nullptr && same->memory_ == memory_;
    }
#else
    void *allocate(cuda::stream_ref stream, std::size_t bytes, std::size_t alignment = 256) {
        return memory_->allocate(stream.get(), bytes, alignment);
    }

    void deallocate(cuda::stream_ref stream, void *memory, std::size_t, std::size_t = 256) noexcept {
        memory_->deallocate(stream.get(), memory);
    }

    /// For code without a stream: the legacy default stream, and a wait for it.
    void *allocate_sync(std::size_t bytes, std::size_t alignment = 256) {
        void *memory = memory_->allocate(nullptr, bytes, alignment);
        memory_->synchronize(nullptr);
        return memory;
    }

    void deallocate_sync(void *memory, std::size_t, std::size_t = 256) noexcept { memory_->deallocate_unused(memory); }

    friend bool operator==(memory_resource const &a, memory_resource const &b) noexcept { return a.memory_ == b.memory_; }
    friend bool operator!=(memory_resource const &a, memory_resource const &b) noexcept { return a.memory_ != b.memory_; }
    friend constexpr void get_property(memory_resource const &, cuda::mr::device_accessible) noexcept {}

  private:
#endif
    std::shared_ptr<device_memory> memory_;
};

#if !HIGHWATER_RMM_HAS_BASE
static_assert(cuda::mr::resource_with<memory_resource, cuda::mr::device_accessible>);
#endif

} // namespace highwater
