// RMM allocates from Highwater.
#include "../c/check.h"
#include "highwater_memory_resource.hpp"

#include <thread>
#include <vector>

int main() {
    highwater_runtime *runtime = open_any();
    highwater_device *device = nullptr;
    highwater_stream *streams[2] = {nullptr, nullptr};
    std::uint64_t raw[2] = {0, 0};
    CHECK(highwater_device_get(runtime, 0, &device));
    for (int i = 0; i < 2; i++) {
        CHECK(highwater_stream_create(device, &streams[i]));
        CHECK(highwater_stream_raw(streams[i], &raw[i]));
    }
    cuda::stream_ref const one{reinterpret_cast<cudaStream_t>(raw[0])}, two{reinterpret_cast<cudaStream_t>(raw[1])};
    {
        highwater::memory_resource resource{runtime, 0};
        rmm::device_async_resource_ref ref{resource};

        // A deallocation gives the memory back to the pool of its stream, and the next allocation there gets it.
        void *first = ref.allocate(one, 1000, 256);
        EXPECT(first != nullptr && reinterpret_cast<std::uintptr_t>(first) % 256 == 0);
        ref.deallocate(one, first, 1000, 256);
        void *again = ref.allocate(one, 1000, 256);
        EXPECT(again == first);

        // The second stream still uses the memory when it is deallocated there: the first stream waits for it, or gets other memory.
        highwater_buffer *view = nullptr;
        CHECK(highwater_device_adopt(device, reinterpret_cast<std::uint64_t>(again), 1000, nullptr, nullptr, &view));
        CHECK(highwater_fill(streams[1], view, 0, 1000, 3));
        CHECK(highwater_buffer_release(&view));
        ref.deallocate(two, again, 1000, 256);
        void *other = ref.allocate(one, 1000, 256);
        CHECK(highwater_device_adopt(device, reinterpret_cast<std::uint64_t>(other), 1000, nullptr, nullptr, &view));
        CHECK(highwater_fill(streams[0], view, 0, 1000, 4));
        CHECK(highwater_device_synchronize(device));
        unsigned char last = 0;
        CHECK(highwater_read(streams[0], view, 999, &last, 1));
        EXPECT(last == 4);
        CHECK(highwater_buffer_release(&view));
        ref.deallocate(one, other, 1000, 256);

        highwater::memory_resource const same = resource;
        EXPECT(same == resource && !(same == highwater::memory_resource{runtime, 0}));
        EXPECT(ref.allocate(one, 0, 256) == nullptr);
        bool refused = false;
        try {
            (void)ref.allocate(one, std::size_t{1} << 60, 256);
        } catch (rmm::out_of_memory const &error) {
            refused = std::string{error.what()}.find("out of memory") != std::string::npos;
        }
        EXPECT(refused);

        std::vector<std::thread> threads;
        for (int i = 0; i < 4; i++) {
            threads.emplace_back([copy = ref, stream = i % 2 == 0 ? one : two]() mutable {
                for (std::size_t bytes = 1; bytes < 200; bytes++) {
                    copy.deallocate(stream, copy.allocate(stream, bytes, 256), bytes, 256);
                }
            });
        }
        for (auto &thread : threads) {
            thread.join();
        }
#if !HIGHWATER_RMM_HAS_BASE
        // The wait of the base class is RMM's own, and needs CUDA.
        void *synchronous = ref.allocate_sync(64, 256);
        EXPECT(synchronous != nullptr);
        ref.deallocate_sync(synchronous, 64, 256);
#endif
    }
    for (auto &stream : streams) {
        CHECK(highwater_stream_release(&stream));
    }
    CHECK(highwater_device_release(&device));
    close_all(runtime);
    std::puts("RMM allocates from Highwater");
}
