//! [`PooledBlas`]: cudarc's products with handles of Highwater's pool.

use std::ffi::c_void;

use cudarc::cublas::result::{CublasError, gemm_ex, gemm_strided_batched_ex};
use cudarc::cublas::{Gemm, GemmConfig, StridedBatchedConfig, sys};
use cudarc::driver::{DevicePtr, DevicePtrMut};
use highwater_core::{Error, ErrorKind, Result};

use crate::stream::JoinedStream;

/// Replaces an `Arc<CudaBlas>`. It owns no handle: each product takes one of Highwater's pool, bound to the stream and its workspace. A handle
/// that has the right settings is not set again. The type implements cudarc's `Gemm` for `f32` and `f64`. [`PooledBlas::with_handle`] serves
/// all other calls of cuBLAS.
///
/// An `Arc<PooledBlas>` can be shared by threads. Each has a handle of its own meanwhile. The innermost `Numerics` policy applies.
#[derive(Debug, Clone)]
pub struct PooledBlas {
    stream: JoinedStream,
}

impl PooledBlas {
    /// Makes products for a stream. Takes no handle.
    #[must_use]
    pub fn new(stream: &JoinedStream) -> Self {
        Self { stream: stream.clone() }
    }

    /// Lends a handle to code that would take `*blas.handle()`, for one call. The handle is bound to the stream, with a workspace of its
    /// own. All settings are restored before the next use, which costs calls of cuBLAS. For code that changes none,
    /// `BlasLease::enqueue_raw` is cheaper. The code must not destroy the handle.
    ///
    /// # Errors
    /// As `Stream::blas` and `BlasLease::with_raw`.
    pub fn with_handle<R>(&self, foreign: impl FnOnce(sys::cublasHandle_t) -> R) -> Result<R> {
        self.stream.blas()?.with_raw(|raw| foreign(std::ptr::with_exposed_provenance_mut(raw.handle as usize)))
    }

    /// # Safety
    /// As for `BlasLease::enqueue_raw`.
    unsafe fn product(
        &self,
        enqueue: impl FnOnce(sys::cublasHandle_t) -> Result<(), CublasError>,
    ) -> Result<(), CublasError> {
        let enqueue = |handle| enqueue(std::ptr::with_exposed_provenance_mut(handle as usize));
        // SAFETY: As the caller promises.
        let enqueued = self.stream.blas().and_then(|mut blas| unsafe { blas.enqueue_raw(enqueue) });
        enqueued.unwrap_or_else(|error| Err(CublasError(status(&error))))
    }
}

/// Returns cuBLAS's status for an error of the pool.
fn status(error: &Error) -> sys::cublasStatus_t {
    match error.kind() {
        ErrorKind::OutOfMemory => sys::cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED,
        ErrorKind::Unsupported => sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
        ErrorKind::InvalidArgument => sys::cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE,
        _ => sys::cublasStatus_t::CUBLAS_STATUS_NOT_INITIALIZED,
    }
}

macro_rules! products_of {
    ($scalar:ty, $data:ident, $compute:ident) => {
        impl Gemm<$scalar> for PooledBlas {
            unsafe fn gemm<A: DevicePtr<$scalar>, B: DevicePtr<$scalar>, C: DevicePtrMut<$scalar>>(
                &self,
                cfg: GemmConfig<$scalar>,
                a: &A,
                b: &B,
                c: &mut C,
            ) -> Result<(), CublasError> {
                let stream = self.stream.cuda_stream();
                let (alpha, beta) = (cfg.alpha, cfg.beta);
                let (a, _read_a) = a.device_ptr(stream);
                let (b, _read_b) = b.device_ptr(stream);
                let (c, _written_c) = c.device_ptr_mut(stream);
                // SAFETY: The caller passes valid matrices, which cudarc frees after the work. The factors are on the host, as the pointer
                // mode of the pool's handles says, and are read by the call. The call changes no setting.
                unsafe {
                    self.product(|handle| {
                        gemm_ex(
                            handle,
                            cfg.transa,
                            cfg.transb,
                            cfg.m,
                            cfg.n,
                            cfg.k,
                            (&raw const alpha).cast::<c_void>(),
                            a as *const c_void,
                            sys::cudaDataType_t::$data,
                            cfg.lda,
                            b as *const c_void,
                            sys::cudaDataType_t::$data,
                            cfg.ldb,
                            (&raw const beta).cast::<c_void>(),
                            c as *mut c_void,
                            sys::cudaDataType_t::$data,
                            cfg.ldc,
                            sys::cublasComputeType_t::$compute,
                            sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
                        )
                    })
                }
            }

            unsafe fn gemm_strided_batched<A: DevicePtr<$scalar>, B: DevicePtr<$scalar>, C: DevicePtrMut<$scalar>>(
                &self,
                cfg: StridedBatchedConfig<$scalar>,
                a: &A,
                b: &B,
                c: &mut C,
            ) -> Result<(), CublasError> {
                let stream = self.stream.cuda_stream();
                let (alpha, beta) = (cfg.gemm.alpha, cfg.gemm.beta);
                let (a, _read_a) = a.device_ptr(stream);
                let (b, _read_b) = b.device_ptr(stream);
                let (c, _written_c) = c.device_ptr_mut(stream);
                // SAFETY: As above.
                unsafe {
                    self.product(|handle| {
                        gemm_strided_batched_ex(
                            handle,
                            cfg.gemm.transa,
                            cfg.gemm.transb,
                            cfg.gemm.m,
                            cfg.gemm.n,
                            cfg.gemm.k,
                            (&raw const alpha).cast::<c_void>(),
                            a as *const c_void,
                            sys::cudaDataType_t::$data,
                            cfg.gemm.lda,
                            cfg.stride_a,
                            b as *const c_void,
                            sys::cudaDataType_t::$data,
                            cfg.gemm.ldb,
                            cfg.stride_b,
                            (&raw const beta).cast::<c_void>(),
                            c as *mut c_void,
                            sys::cudaDataType_t::$data,
                            cfg.gemm.ldc,
                            cfg.stride_c,
                            cfg.batch_size,
                            sys::cublasComputeType_t::$compute,
                            sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
                        )
                    })
                }
            }
        }
    };
}

products_of!(f32, CUDA_R_32F, CUBLAS_COMPUTE_32F);
products_of!(f64, CUDA_R_64F, CUBLAS_COMPUTE_64F);
