//! The test mode that poisons free memory: it finds writes after the free, and variants of the pool that reuse memory early.

use std::sync::Arc;
use std::thread;

use super::thread_cache::mine;
use crate::testing::ManualBackend;
use crate::{ErrorKind, HostCacheStatistics, HostMemoryOptions, PinnedBuffer, Runtime, RuntimeOptions, Stream};

const KIB: usize = 1 << 10;

fn open() -> (Arc<ManualBackend>, Runtime) {
    let backend = ManualBackend::new();
    let options = RuntimeOptions::new().with_host_memory(HostMemoryOptions::new().with_poison(true));
    let runtime = Runtime::with_options(backend.clone(), &options).unwrap();
    backend.watch_locks_of(&runtime);
    (backend, runtime)
}

fn host(runtime: &Runtime) -> HostCacheStatistics {
    let host = runtime.statistics().host;
    assert_eq!(host.broken_law(), None, "{host:?}");
    host
}

fn stream(runtime: &Runtime) -> Stream {
    runtime.device(0).unwrap().create_stream().unwrap()
}

/// The number of blocks that wait in the thread caches of this thread.
fn waiting_in_cache() -> u64 {
    mine().iter().map(|cache| cache.cached.other(|cached| cached.waiting().0)).sum()
}

/// A buffer that a copy of `stream` reads.
fn used(runtime: &Runtime, stream: &Stream, bytes: usize) -> PinnedBuffer<u8> {
    let pinned = runtime.pinned::<u8>(bytes).unwrap();
    stream.copy_to_device(&pinned, &runtime.device(0).unwrap().allocate(bytes).unwrap()).unwrap();
    pinned
}

#[test]
fn a_write_after_the_free_is_found_at_the_reuse_and_the_memory_is_not_used_again() {
    let (_backend, runtime) = open();
    for bytes in [4 * KIB, 3 << 20] {
        let pinned = runtime.pinned::<u8>(bytes).unwrap();
        let ptr = pinned.ptr();
        drop(pinned);
        // SAFETY: Still page-locked memory of the pool, in a test of one thread.
        unsafe { ptr.as_ptr().add(1234).write(7) };
        let before = host(&runtime).unmarked_blocks;
        let error = runtime.pinned::<u8>(bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidState);
        let expected =
            format!("the block of {bytes} bytes at {ptr} was written at offset 1234 after it was freed: 0x07");
        assert_eq!(error.message(), expected);
        assert_eq!((host(&runtime).unmarked_blocks, host(&runtime).live_blocks), (before + 1, 0));
        assert_ne!(runtime.pinned::<u8>(bytes).unwrap().ptr(), ptr);
    }
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn sound_programs_pass_and_use_the_thread_caches() {
    let (backend, runtime) = open();
    let (stream, other) = (stream(&runtime), stream(&runtime));
    for round in 0..40 {
        let mut pinned = used(&runtime, [&stream, &other][round % 2], KIB << (round % 13));
        if round % 3 == 0 {
            backend.advance(stream.id());
            backend.advance(other.id());
            pinned.write().unwrap().fill(round as u8);
        }
        if round % 5 == 0 {
            thread::scope(|scope| scope.spawn(|| drop(pinned)).join().unwrap());
        }
        let on_device = runtime.device(0).unwrap().allocate(100).unwrap();
        let graph = stream.capture(|stream| stream.copy_to_device(&runtime.pinned::<u8>(100)?, &on_device));
        graph.unwrap().launch(&other).unwrap();
        if round % 7 == 0 {
            runtime.trim().unwrap();
        }
    }
    drop(runtime.pinned::<u8>(3 * KIB).unwrap());
    let before = host(&runtime).cache_hits + host(&runtime).inbox_hits;
    drop(runtime.pinned::<u8>(3 * KIB).unwrap());
    assert_eq!(host(&runtime).cache_hits + host(&runtime).inbox_hits, before + 1);
    drop((stream, other));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

/// The wrong variant believes a completion event before it is passed.
#[test]
fn a_completion_that_is_read_too_early_is_found() {
    let (backend, runtime) = open();
    let stream = stream(&runtime);
    let pinned = used(&runtime, &stream, 2 << 20);
    let ptr = pinned.ptr();
    drop(pinned);
    runtime.inner.pinned.of_runtime().collect_too_early();
    assert_eq!((host(&runtime).waiting_blocks, host(&runtime).free_bytes), (0, 2 << 20));
    // A part of the block is enough.
    let error = runtime.pinned::<u8>(3 * KIB).unwrap_err();
    let expected = format!("the block of 4096 bytes at {ptr} was to be reused before stream ");
    assert!(error.message().starts_with(&expected), "{error}");
    backend.advance(stream.id());
    drop(stream);
    assert_eq!(runtime.close().unwrap().total(), 0);
}

#[test]
fn the_wait_lists_of_thread_caches_are_used_and_their_blocks_have_the_pattern() {
    let (backend, runtime) = open();
    let stream = stream(&runtime);
    let device = runtime.device(0).unwrap().allocate::<u8>(4 * KIB).unwrap();
    let mut pinned = runtime.pinned::<u8>(4 * KIB).unwrap();
    let ptr = pinned.ptr();
    // A write of host memory has a completion event of its own.
    stream.copy_to_host(&device, &mut pinned).unwrap();
    drop(pinned);
    assert_eq!((waiting_in_cache(), host(&runtime).waiting_blocks), (1, 1));
    backend.advance(stream.id());
    // Its contents are not those of a write after the free.
    let again = runtime.pinned::<u8>(4 * KIB).unwrap();
    assert_eq!((again.ptr(), host(&runtime).waiting_hits), (ptr, 1));
    drop((again, stream, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

/// Before a small pool grows, a thread that is behind puts those of its waiting blocks back whose streams are done.
#[test]
fn blocks_that_a_thread_which_is_behind_puts_back_have_the_pattern() {
    let (backend, runtime) = open();
    let (behind, done) = (stream(&runtime), stream(&runtime));
    let device = runtime.device(0).unwrap().allocate::<u8>(4 * KIB).unwrap();
    let mut blocks: Vec<_> = (0..20).map(|_| runtime.pinned::<u8>(4 * KIB).unwrap()).collect();
    let rest = runtime.pinned::<u8>((2 << 20) - 20 * 4 * KIB).unwrap();
    for (number, block) in blocks.iter_mut().enumerate() {
        [&done, &behind][usize::from(number == 0)].copy_to_host(&device, block).unwrap();
    }
    drop(blocks);
    backend.advance(done.id());
    // The block that has waited longest is not done, and no page is free.
    let again = runtime.pinned::<u8>(4 * KIB).unwrap();
    assert_eq!((host(&runtime).misses, waiting_in_cache()), (1, 1), "{:?}", host(&runtime));
    backend.advance(behind.id());
    drop((again, rest, behind, done, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}

/// The wrong variant gives a block of a wait list out before its query has passed.
#[test]
fn a_wait_list_that_forgets_a_use_is_found() {
    let (backend, runtime) = open();
    let stream = stream(&runtime);
    drop(used(&runtime, &stream, 4 * KIB));
    assert_eq!(waiting_in_cache(), 1);
    for cache in mine() {
        // SAFETY: In the thread that owns the cache, and the closure accesses no thread cache.
        unsafe {
            cache.cached.own(|cached| {
                let Some(block) = cached.pop_waiting(1) else { return };
                assert!(block.uses.are_over(|_| true));
                assert!(cached.keep_waiting(block).is_none());
            });
        }
    }
    let error = runtime.pinned::<u8>(4 * KIB).unwrap_err();
    assert!(error.message().contains("was to be reused before stream "), "{error}");
    backend.advance(stream.id());
    drop(stream);
    assert_eq!(runtime.close().unwrap().total(), 0);
}

/// The wrong variant puts a block into the thread cache that a stream uses.
#[test]
fn a_thread_cache_that_forgets_a_use_is_found() {
    let (backend, runtime) = open();
    let stream = stream(&runtime);
    let pinned = used(&runtime, &stream, 4 * KIB);
    let forget = |pinned: &PinnedBuffer<u8>| assert!(pinned.block().uses.are_over(|_| true));
    forget(&pinned);
    drop(pinned);
    assert_eq!((host(&runtime).cached_blocks, host(&runtime).waiting_blocks), (1, 0));
    let error = runtime.pinned::<u8>(4 * KIB).unwrap_err();
    assert!(error.message().contains("was to be reused before stream "), "{error}");

    // The stream has written since, and is done.
    let mut pinned = runtime.pinned::<u8>(4 * KIB).unwrap();
    let device = runtime.device(0).unwrap().allocate::<u8>(4 * KIB).unwrap();
    stream.copy_to_host(&device, &mut pinned).unwrap();
    forget(&pinned);
    drop(pinned);
    backend.advance(stream.id());
    let error = runtime.pinned::<u8>(4 * KIB).unwrap_err();
    assert!(error.message().contains("was written at offset 0 after it was freed"), "{error}");
    drop((stream, device));
    assert_eq!(runtime.close().unwrap().total(), 0);
}
