//! How tensors reach the device, and where products take their handle.

use std::time::{Duration, Instant};

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::cublas::{Gemm, GemmConfig, StridedBatchedConfig, sys::cublasOperation_t};
use candle_core::cuda_backend::cudarc::driver::PinnedHostSlice;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, Device, Error, Layout, Result, Shape, Storage, Tensor};
use highwater::hal::HostMemoryKind;
use highwater::{Runtime, Stream};
use highwater_cudarc::{CudarcPinned, JoinedStream, PooledBlas, StreamExt};

/// Where the bytes of a copy to the device are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// candle's own way: `Tensor::from_slice` copies from pageable memory.
    Pageable,
    /// `alloc_pinned` of cudarc, once for each tensor. It is write-combined.
    Cudarc,
    /// The pinned pool of Highwater, in this kind of memory.
    Pool(HostMemoryKind),
}

/// A device of candle and the same stream for Highwater. Belongs to one thread.
pub struct Place {
    pub device: Device,
    pub stream: JoinedStream,
    pub blas: PooledBlas,
}

impl Place {
    pub fn new(runtime: &Runtime, device: Device) -> Result<Self> {
        let stream = Stream::of(runtime, &device.as_cuda_device()?.cuda_stream()).map_err(Error::wrap)?;
        let blas = PooledBlas::new(&stream);
        Ok(Self { device, stream, blas })
    }
}

/// Copies of one run. Keeps the memory that they read until [`Staging::finish`].
pub struct Staging<'a> {
    place: &'a Place,
    memory: Memory,
    cudarc: Vec<PinnedHostSlice<f32>>,
    pool: Vec<CudarcPinned<f32>>,
    /// The time to take and to give back pinned memory.
    pub pinned: Duration,
}

impl<'a> Staging<'a> {
    pub fn new(place: &'a Place, memory: Memory) -> Self {
        Self { place, memory, cudarc: Vec::new(), pool: Vec::new(), pinned: Duration::ZERO }
    }

    /// Copies values to a new tensor.
    pub fn tensor(&mut self, values: &[f32], shape: (usize, usize)) -> Result<Tensor> {
        let Place { device, stream, .. } = self.place;
        let cuda = device.as_cuda_device()?;
        let slice = match self.memory {
            Memory::Pageable => return Tensor::from_slice(values, shape, device),
            Memory::Cudarc => {
                let start = Instant::now();
                // SAFETY: All values are written before they are read.
                let pinned = unsafe { cuda.cuda_stream().context().alloc_pinned::<f32>(values.len()) };
                let mut pinned = pinned.map_err(Error::wrap)?;
                self.pinned += start.elapsed();
                pinned.as_mut_slice().map_err(Error::wrap)?.copy_from_slice(values);
                let slice = cuda.clone_htod(&pinned)?;
                self.cudarc.push(pinned);
                slice
            }
            Memory::Pool(kind) => {
                let start = Instant::now();
                let buffer = stream.runtime().pinned_of::<f32>(values.len(), kind).map_err(Error::wrap)?;
                let mut pinned = CudarcPinned::new(buffer, stream).map_err(Error::wrap)?;
                self.pinned += start.elapsed();
                pinned.write().map_err(Error::wrap)?.copy_from_slice(values);
                let slice = cuda.clone_htod(&pinned)?;
                self.pool.push(pinned);
                slice
            }
        };
        let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(slice, cuda.clone()));
        Ok(Tensor::from_storage(storage, shape, BackpropOp::none(), false))
    }

    /// Waits for the copies and gives the pinned memory back. Returns the time to take it and to give it back.
    pub fn finish(mut self) -> Result<Duration> {
        self.place.device.synchronize()?;
        let start = Instant::now();
        self.cudarc.clear();
        self.pool.clear();
        Ok(self.pinned + start.elapsed())
    }
}

/// The handle of the products.
pub enum Way {
    /// candle's products, with the handle that candle keeps.
    Candle,
    /// The same products with a handle of Highwater's pool.
    Pooled(PooledBlas),
}

impl Way {
    pub fn product(&self, left: &Tensor, right: &Tensor) -> Result<Tensor> {
        match self {
            Self::Candle => left.matmul(right),
            Self::Pooled(blas) => left.apply_op2_no_bwd(right, &Product(blas)),
        }
    }
}

/// candle's product of two matrices, row by row, with a pooled handle.
struct Product<'a>(&'a PooledBlas);

impl CustomOp2 for Product<'_> {
    fn name(&self) -> &'static str {
        "pooled-product"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Err(Error::msg("a pooled handle multiplies on CUDA only"))
    }

    fn cuda_fwd(&self, a: &CudaStorage, a_at: &Layout, b: &CudaStorage, b_at: &Layout) -> Result<(CudaStorage, Shape)> {
        let ((m, k), (rows, n)) = (a_at.shape().dims2()?, b_at.shape().dims2()?);
        let (Some((a_start, a_end)), Some((b_start, b_end)), true) =
            (a_at.contiguous_offsets(), b_at.contiguous_offsets(), rows == k)
        else {
            return Err(Error::msg(format!(
                "the factors are {m} x {k} and {rows} x {n}, expected contiguous ones that match"
            )));
        };
        let [ints_m, ints_n, ints_k] = [m, n, k].map(i32::try_from);
        let (int_m, int_n, int_k) =
            (ints_m.map_err(Error::wrap)?, ints_n.map_err(Error::wrap)?, ints_k.map_err(Error::wrap)?);
        let device = a.device();
        let (left, right) =
            (a.as_cuda_slice::<f32>()?.slice(a_start..a_end), b.as_cuda_slice::<f32>()?.slice(b_start..b_end));
        // SAFETY: The product writes all values.
        let mut out = unsafe { device.alloc::<f32>(m * n)? };
        let keep = cublasOperation_t::CUBLAS_OP_N;
        // cuBLAS counts by columns, so the factors change places.
        let gemm = GemmConfig {
            transa: keep,
            transb: keep,
            m: int_n,
            n: int_m,
            k: int_k,
            alpha: 1.0,
            lda: int_n,
            ldb: int_k,
            beta: 0.0,
            ldc: int_n,
        };
        let strides = [n * k, m * k, m * n].map(|it| it as i64);
        let [stride_a, stride_b, stride_c] = strides;
        let config = StridedBatchedConfig { gemm, batch_size: 1, stride_a, stride_b, stride_c };
        // SAFETY: The matrices have the sizes of the configuration.
        unsafe { self.0.gemm_strided_batched(config, &right, &left, &mut out) }.map_err(Error::wrap)?;
        Ok((CudaStorage::wrap_cuda_slice(out, device.clone()), Shape::from((m, n))))
    }
}

/// Reads a result through pinned memory of the pool.
pub fn read_back(place: &Place, tensor: &Tensor) -> Result<Vec<f32>> {
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cuda(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
        return Err(Error::msg("the result is not a contiguous tensor of the device"));
    };
    let buffer = place.stream.runtime().pinned::<f32>(end - start).map_err(Error::wrap)?;
    let mut pinned = CudarcPinned::new(buffer, &place.stream).map_err(Error::wrap)?;
    let slice = storage.as_cuda_slice::<f32>()?.slice(start..end);
    storage.device().memcpy_dtoh(&slice, &mut pinned)?;
    Ok(pinned.read().map_err(Error::wrap)?.to_vec())
}
