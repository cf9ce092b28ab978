//! Handles and products where the rules of `backend-cuda/tests/rules/`, which run over real libraries too, say nothing.

use std::ffi::c_void;
use std::ptr::null_mut;

use highwater_simulated_harness::library::text_of;
use highwater_simulated_harness::values::{diagonal_of, is_diagonal};
use highwater_simulated_harness::{code, isolated, ok};

use crate::rig::{Blas, Driver, Lt, allocate, download, handle, start, stream, upload};

/// Edge of the matrices below, whose product needs more than the least workspace.
const EDGE: usize = 80;
const WORKSPACE: usize = 1 << 16;

/// Enqueues `C = A * B` of square matrices.
fn square(handle: *mut c_void, a: u64, b: u64, c: u64) -> u32 {
    let (one, zero, edge) = (1f32, 0f32, EDGE as i32);
    code!(Blas.cublasSgemm_v2(handle, 0, 0, edge, edge, edge, &one, a, edge, b, edge, &zero, c, edge))
}

/// A square matrix that is `value` on its diagonal.
fn diagonal(value: f32, stream: *mut c_void) -> u64 {
    upload(&diagonal_of(EDGE, value), stream)
}

fn is_square(c: u64, value: f32, stream: *mut c_void) -> bool {
    is_diagonal(&download(c, EDGE * EDGE, stream), EDGE, value)
}

isolated! {
    fn without_a_device_there_are_versions_and_texts_and_no_handle(_) over ["cuda:no-device"] {
        let (mut version, mut part, mut handle) = (0, 0, null_mut());
        ok!(Blas.cublasGetVersion_v2(null_mut(), &mut version));
        ok!(Lt.cublasLtGetProperty(1, &mut part));
        assert_eq!((version, part), (130_100, 1));
        assert_eq!(code!(Blas.cublasGetProperty(0, null_mut())), 7);
        assert_eq!(text_of(&Blas::get().library, "cublasGetStatusString", 3u32).unwrap(), "the resource allocation failed");
        assert!(!text_of(&Lt::get().library, "cublasLtGetStatusName", 4711u32).unwrap().is_empty());
        assert_eq!((code!(Blas.cublasCreate_v2(&mut handle)), code!(Lt.cublasLtCreate(&mut handle))), (1, 1));
        assert!(handle.is_null());
    }

    fn over_a_stub_there_is_no_handle(_) over ["cuda:stub"] {
        assert_eq!(code!(Blas.cublasCreate_v2(&mut null_mut())), 1);
    }

    fn stale_and_foreign_handles_are_not_initialized_and_bad_places_invalid(_) over ["cuda"] {
        start(0);
        let (stale, mut lt, mut mode) = (handle(), null_mut(), 0);
        ok!(Lt.cublasLtCreate(&mut lt));
        ok!(Blas.cublasDestroy_v2(stale));
        for bad in [stale, lt] {
            assert_eq!(code!(Blas.cublasDestroy_v2(bad)), 1);
            assert_eq!(code!(Blas.cublasSetStream_v2(bad, null_mut())), 1);
            assert_eq!(code!(Blas.cublasSetWorkspace_v2(bad, 0, 0)), 1);
            assert_eq!(code!(Blas.cublasGetAtomicsMode(bad, &mut mode)), 1);
            assert_eq!(square(bad, 0, 0, 0), 1);
        }
        let handle = handle();
        assert_eq!(code!(Blas.cublasSetWorkspace_v2(handle, 0, 1024)), 7);
        assert_eq!(code!(Blas.cublasSetPointerMode_v2(handle, 2)), 7);
        let one = 1f32;
        assert_eq!(code!(Blas.cublasSgemmStridedBatched(handle, 0, 0, 4, 4, 4, &one, 0, 4, 0, 0, 4, 0, &one, 0, 4, 0, -1)), 7);
    }

    /// The gap between the two kernels of a product lets the other stream's in.
    fn two_streams_with_one_workspace_spoil_each_other_and_with_their_own_do_not(_)
        over ["cuda"] with HIGHWATER_MOCK = "gemm-gap=100ms"
    {
        start(0);
        let (workspace, together) = (allocate(WORKSPACE), &std::sync::Barrier::new(2));
        let both_are_right = |shared: bool| {
            let results: Vec<_> = std::thread::scope(|scope| {
                let threads = [2f32, 3.0].map(|value| {
                    scope.spawn(move || {
                        start(0);
                        let (handle, stream) = (handle(), stream());
                        let [a, c] = [value, 0.0].map(|value| diagonal(value, stream));
                        ok!(Blas.cublasSetStream_v2(handle, stream));
                        if shared {
                            ok!(Blas.cublasSetWorkspace_v2(handle, workspace, WORKSPACE));
                        }
                        (0..5).fold(true, |right, _| {
                            together.wait();
                            assert_eq!(square(handle, a, a, c), 0);
                            is_square(c, value * value, stream) && right
                        })
                    })
                });
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            results == [true, true]
        };
        assert!(!both_are_right(true));
        assert!(both_are_right(false));
    }

    fn a_handle_takes_device_memory_and_gives_it_back(_) over ["cuda"] with HIGHWATER_MOCK = "memory=64GiB" {
        start(0);
        let free = || {
            let (mut free, mut total) = (0, 0);
            ok!(Driver.cuMemGetInfo_v2(&mut free, &mut total));
            free
        };
        let before = free();
        let first = handle();
        assert_eq!(before - free(), 64 << 20);
        ok!(Blas.cublasDestroy_v2(first));
        assert_eq!(free(), before);
    }

    fn a_handle_that_finds_no_memory_is_not_made(_)
        over ["cuda"] with CUBLAS_WORKSPACE_CONFIG = ":1024:8" with HIGHWATER_MOCK = "memory=15MiB"
    {
        start(0);
        let first = handle();
        let mut second = null_mut();
        assert_eq!(code!(Blas.cublasCreate_v2(&mut second)), 3);
        ok!(Blas.cublasDestroy_v2(first));
        ok!(Blas.cublasCreate_v2(&mut second));
    }

    fn threads_with_handles_of_their_own_do_not_disturb_each_other(_) over ["cuda"] {
        std::thread::scope(|scope| {
            for value in 1..=6u8 {
                scope.spawn(move || {
                    start(0);
                    let (stream, value) = (stream(), f32::from(value));
                    let [a, c] = [value, 0.0].map(|value| diagonal(value, stream));
                    let workspace = allocate(WORKSPACE);
                    for round in 0..20 {
                        let handle = handle();
                        ok!(Blas.cublasSetStream_v2(handle, stream));
                        if round % 2 == 0 {
                            ok!(Blas.cublasSetWorkspace_v2(handle, workspace, WORKSPACE));
                        }
                        assert_eq!(square(handle, a, a, c), 0);
                        assert!(is_square(c, value * value, stream));
                        ok!(Blas.cublasDestroy_v2(handle));
                    }
                });
            }
        });
    }

    fn a_fault_of_the_mock_is_a_launch_that_fails_once(_) over ["cuda"] with HIGHWATER_MOCK = "fail=gemm:2" {
        start(0);
        let (handle, stream) = (handle(), stream());
        let [a, c] = [2.0, 0.0].map(|value| diagonal(value, stream));
        ok!(Blas.cublasSetStream_v2(handle, stream));
        assert_eq!([(); 3].map(|()| square(handle, a, a, c)), [0, 13, 0]);
        assert!(is_square(c, 4.0, stream));
    }

    fn operands_that_a_kernel_would_reach_and_the_mock_does_not_are_not_supported(_)
        over ["cuda"] with HIGHWATER_MOCK = "devices=2"
    {
        start(1);
        let foreign = diagonal(1.0, null_mut());
        start(0);
        let (handle, c) = (handle(), diagonal(0.0, null_mut()));
        let (mut pinned, mut context) = (null_mut(), null_mut());
        ok!(Driver.cuMemHostAlloc(&mut pinned, EDGE * EDGE * 4, 0));
        assert_eq!(square(handle, pinned as u64, c, c), 15);
        ok!(Driver.cuDevicePrimaryCtxRetain(&mut context, 1));
        ok!(Driver.cuCtxEnablePeerAccess(context, 0));
        assert_eq!(square(handle, foreign, c, c), 15);
        ok!(Driver.cuCtxSynchronize());
        // The other way access was not enabled.
        start(1);
        assert_eq!(square(self::handle(), c, foreign, foreign), 0);
        assert_eq!(code!(Driver.cuCtxSynchronize()), 700);
    }

    fn a_stream_of_another_device_succeeds_and_loses_the_contexts(_) over ["cuda"] with HIGHWATER_MOCK = "devices=2" {
        start(0);
        let handle = handle();
        let c = diagonal(0.0, null_mut());
        start(1);
        let foreign = stream();
        ok!(Blas.cublasSetStream_v2(handle, foreign));
        assert_eq!(square(handle, c, c, c), 0);
        assert_eq!(code!(Driver.cuStreamSynchronize(foreign)), 700);
        assert_eq!(code!(Driver.cuCtxSynchronize()), 700);
        assert_eq!(square(handle, c, c, c), 13);
        assert_eq!(code!(Blas.cublasCreate_v2(&mut null_mut())), 1);
        // For good.
        assert_eq!(code!(Driver.cuMemAlloc_v2(&mut 0, 16)), 700);
    }

    fn the_null_stream_is_that_of_the_current_context(_) over ["cuda"] with HIGHWATER_MOCK = "devices=2" {
        start(0);
        let handle = handle();
        let [a, c] = [2.0, 0.0].map(|value| diagonal(value, null_mut()));
        assert_eq!(square(handle, a, a, c), 0);
        assert!(is_square(c, 4.0, null_mut()));
        start(1);
        assert_eq!(square(handle, a, a, c), 0);
        assert_eq!(code!(Driver.cuCtxSynchronize()), 700);
    }

    fn an_address_between_two_elements_succeeds_and_loses_the_context(_) over ["cuda"] {
        start(0);
        let (handle, c) = (handle(), diagonal(0.0, null_mut()));
        assert_eq!(square(handle, c + 2, c, c), 0);
        assert_eq!(code!(Driver.cuCtxSynchronize()), 716);
    }

}
