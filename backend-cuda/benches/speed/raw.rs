//! The vendor's own calls: bare function pointers from the libraries that the backend has opened.

use anyhow::{Context as _, Result, bail, ensure};
use cudarc::cublas::sys::{cublasAtomicsMode_t, cublasComputeType_t, cublasGemmAlgo_t, cublasMath_t, cudaDataType_t};
use cudarc::cublaslt::sys::cublasLtMatmulPreferenceAttributes_t;
use cudarc::driver::sys::{CUevent_flags, CUresult, CUstream_flags};
use highwater_core::{DataType, Identity};
use highwater_driver::Library;

/// Declares a table of function pointers with its loader. Handles are numbers with the width of a pointer.
macro_rules! calls {
    ($(#[$about:meta])* $name:ident { $($field:ident: $symbol:literal ($($argument:ty),* $(,)?);)* }) => {
        $(#[$about])*
        pub(crate) struct $name { $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> i32,)* }

        impl $name {
            /// # Safety
            /// The caller must ensure that the library exports functions of these arguments under these names.
            unsafe fn load(library: &Library) -> Result<Self> {
                let find = |name| library.symbol(name).with_context(|| format!("{} lacks {name}", library.name()));
                Ok(Self {
                    $($field: {
                        let found = find($symbol)?;
                        // SAFETY: The caller promises that the symbol is a function of these arguments.
                        unsafe { std::mem::transmute::<*const (), unsafe extern "C" fn($($argument),*) -> i32>(found) }
                    },)*
                })
            }
        }
    };
}

calls! {
    /// libcuda.
    Cuda {
        device: "cuDeviceGet" (*mut i32, i32);
        context_retain: "cuDevicePrimaryCtxRetain" (*mut u64, i32);
        context_release: "cuDevicePrimaryCtxRelease_v2" (i32);
        context_push: "cuCtxPushCurrent_v2" (u64);
        context_pop: "cuCtxPopCurrent_v2" (*mut u64);
        stream_create: "cuStreamCreateWithPriority" (*mut u64, u32, i32);
        stream_destroy: "cuStreamDestroy_v2" (u64);
        stream_synchronize: "cuStreamSynchronize" (u64);
        stream_query: "cuStreamQuery" (u64);
        event_create: "cuEventCreate" (*mut u64, u32);
        event_destroy: "cuEventDestroy_v2" (u64);
        event_record: "cuEventRecord" (u64, u64);
        event_query: "cuEventQuery" (u64);
        event_synchronize: "cuEventSynchronize" (u64);
        allocate: "cuMemAlloc_v2" (*mut u64, usize);
        free: "cuMemFree_v2" (u64);
        allocate_async: "cuMemAllocAsync" (*mut u64, usize, u64);
        free_async: "cuMemFreeAsync" (u64, u64);
        fill: "cuMemsetD8Async" (u64, u8, usize, u64);
        copy_to_device: "cuMemcpyHtoDAsync_v2" (u64, *const u8, usize, u64);
        copy_to_host: "cuMemcpyDtoHAsync_v2" (*mut u8, u64, usize, u64);
        host_allocate: "cuMemHostAlloc" (*mut *mut u8, usize, u32);
        host_free: "cuMemFreeHost" (*mut u8);
        register: "cuMemHostRegister_v2" (*mut u8, usize, u32);
        unregister: "cuMemHostUnregister" (*mut u8);
    }
}

calls! {
    /// libcublas. The product: handle, transposes, m, n, k, alpha, A, type, lda, B, type, ldb, beta, C, type, ldc, compute
    /// type, algorithm.
    Cublas {
        create: "cublasCreate_v2" (*mut u64);
        destroy: "cublasDestroy_v2" (u64);
        set_stream: "cublasSetStream_v2" (u64, u64);
        set_workspace: "cublasSetWorkspace_v2" (u64, u64, usize);
        set_math_mode: "cublasSetMathMode" (u64, u32);
        set_atomics_mode: "cublasSetAtomicsMode" (u64, u32);
        gemm: "cublasGemmEx" (
            u64, i32, i32, i32, i32, i32, *const f32, u64, i32, i32, u64, i32, i32, *const f32, u64, i32, i32, i32, i32
        );
    }
}

calls! {
    /// libcublasLt. The product: handle, description, alpha, A, layout, B, layout, beta, C, layout, D, layout, algorithm,
    /// workspace, its bytes, stream.
    CublasLt {
        create: "cublasLtCreate" (*mut u64);
        destroy: "cublasLtDestroy" (u64);
        product_create: "cublasLtMatmulDescCreate" (*mut u64, i32, i32);
        product_destroy: "cublasLtMatmulDescDestroy" (u64);
        layout_create: "cublasLtMatrixLayoutCreate" (*mut u64, i32, u64, u64, i64);
        layout_destroy: "cublasLtMatrixLayoutDestroy" (u64);
        wish_create: "cublasLtMatmulPreferenceCreate" (*mut u64);
        wish_destroy: "cublasLtMatmulPreferenceDestroy" (u64);
        wish_set: "cublasLtMatmulPreferenceSetAttribute" (u64, u32, *const usize, usize);
        choose: "cublasLtMatmulAlgoGetHeuristic" (u64, u64, u64, u64, u64, u64, u64, i32, *mut Choice, *mut i32);
        matmul: "cublasLtMatmul" (
            u64, u64, *const f32, u64, u64, u64, u64, *const f32, u64, u64, u64, u64, *const [u64; 8], u64, usize, u64
        );
    }
}

/// A result of cuBLASLt's heuristic, in the vendor's layout.
#[derive(Default)]
#[repr(C)]
pub(crate) struct Choice {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: i32,
    waves: f32,
    reserved: [i32; 4],
}

const _: () = assert!(size_of::<Choice>() == size_of::<cudarc::cublaslt::sys::cublasLtMatmulHeuristicResult_t>());

/// Returns `Ok` for 0.
#[inline]
pub(crate) fn done(call: &'static str, code: i32) -> Result<()> {
    if code == 0 { Ok(()) } else { refused(call, code) }
}

#[cold]
fn refused(call: &'static str, code: i32) -> Result<()> {
    bail!("{call} answered {code}")
}

/// Returns whether a query reported completion.
#[inline]
pub(crate) fn answered(call: &'static str, code: i32) -> Result<bool> {
    if code == CUresult::CUDA_ERROR_NOT_READY as i32 { Ok(false) } else { done(call, code).map(|()| true) }
}

/// The three libraries and the primary context of one device.
pub(crate) struct Raw {
    pub(crate) cuda: Cuda,
    pub(crate) blas: Cublas,
    pub(crate) lt: CublasLt,
    device: i32,
    context: u64,
}

impl Raw {
    /// Loads the calls from the files that the backend has opened, and retains the device's primary context.
    pub(crate) fn open(identity: &Identity, ordinal: u32) -> Result<Self> {
        let library = |start: &str| -> Result<Library> {
            let opened = identity.versions.iter().filter(|(what, _)| what == "library").map(|(_, name)| name.as_str());
            let file_name = |name: &str| name.rsplit('/').next().is_some_and(|file| file.starts_with(start));
            let name = opened.clone().find(|name| file_name(name));
            let name = name.with_context(|| format!("the backend names no file {start}*"))?;
            // SAFETY: The backend has opened this file already, so no constructor runs.
            unsafe { Library::open(name) }.map_err(|failure| anyhow::anyhow!("{failure}"))
        };
        // SAFETY: These are NVIDIA's libraries, whose headers declare the functions with these arguments.
        let (cuda, blas, lt) = unsafe {
            (
                Cuda::load(&library("libcuda.so")?)?,
                Cublas::load(&library("libcublas.so")?)?,
                CublasLt::load(&library("libcublasLt.so")?)?,
            )
        };
        let (mut device, mut context) = (0, 0);
        // SAFETY: each call writes one number that lives until it returns.
        done("cuDeviceGet", unsafe { (cuda.device)(&mut device, i32::try_from(ordinal)?) })?;
        // SAFETY: as above.
        done("cuDevicePrimaryCtxRetain", unsafe { (cuda.context_retain)(&mut context, device) })?;
        Ok(Self { cuda, blas, lt, device, context })
    }

    /// Makes the primary context current in this thread.
    pub(crate) fn enter(&self) -> Result<Current<'_>> {
        // SAFETY: the context is retained as long as `self` lives.
        done("cuCtxPushCurrent", unsafe { (self.cuda.context_push)(self.context) })?;
        Ok(Current(self))
    }

    /// Makes the context before the last `enter` current.
    pub(crate) fn leave(&self) -> Result<()> {
        let mut popped = 0;
        // SAFETY: the call writes one number that lives until it returns.
        done("cuCtxPopCurrent", unsafe { (self.cuda.context_pop)(&mut popped) })
    }

    /// Creates a stream with the backend's flags. The context is current.
    pub(crate) fn stream(&self) -> Result<Owned> {
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        Owned::make("cuStreamCreateWithPriority", self.cuda.stream_destroy, |raw| {
            // SAFETY: the call writes one number that lives until it returns.
            unsafe { (self.cuda.stream_create)(raw, flags, 0) }
        })
    }

    /// Creates an event with the backend's flags.
    pub(crate) fn event(&self) -> Result<Owned> {
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        Owned::make("cuEventCreate", self.cuda.event_destroy, |raw| {
            // SAFETY: the call writes one number that lives until it returns.
            unsafe { (self.cuda.event_create)(raw, flags) }
        })
    }

    /// Allocates device memory.
    pub(crate) fn memory(&self, bytes: usize) -> Result<Owned> {
        Owned::make("cuMemAlloc", self.cuda.free, |raw| {
            // SAFETY: the call writes one number that lives until it returns.
            unsafe { (self.cuda.allocate)(raw, bytes) }
        })
    }

    /// Waits for a stream.
    #[inline]
    pub(crate) fn synchronize(&self, stream: &Owned) -> Result<()> {
        // SAFETY: the stream is alive.
        done("cuStreamSynchronize", unsafe { (self.cuda.stream_synchronize)(stream.get()) })
    }

    /// Creates an unbound handle with the modes of the layer's handles.
    pub(crate) fn handle(&self) -> Result<Owned> {
        let handle = Owned::make("cublasCreate", self.blas.destroy, |raw| {
            // SAFETY: the call writes one number that lives until it returns.
            unsafe { (self.blas.create)(raw) }
        })?;
        self.set_modes(&handle, false)?;
        Ok(handle)
    }

    /// Binds a stream and a workspace to a handle.
    #[inline]
    pub(crate) fn bind(&self, handle: &Owned, stream: &Owned, workspace: &Owned, bytes: usize) -> Result<()> {
        // SAFETY: All three are alive and outlive the handle's products, because every user synchronizes before
        // dropping them.
        done("cublasSetStream", unsafe { (self.blas.set_stream)(handle.get(), stream.get()) })?;
        // SAFETY: as above; the workspace has this size.
        done("cublasSetWorkspace", unsafe { (self.blas.set_workspace)(handle.get(), workspace.get(), bytes) })
    }

    /// Sets full precision and no atomics, or TF32 and atomics.
    #[inline]
    pub(crate) fn set_modes(&self, handle: &Owned, quick: bool) -> Result<()> {
        let (math, atomics) = if quick {
            (cublasMath_t::CUBLAS_TF32_TENSOR_OP_MATH, cublasAtomicsMode_t::CUBLAS_ATOMICS_ALLOWED)
        } else {
            (cublasMath_t::CUBLAS_DEFAULT_MATH, cublasAtomicsMode_t::CUBLAS_ATOMICS_NOT_ALLOWED)
        };
        // SAFETY: the handle is alive.
        done("cublasSetMathMode", unsafe { (self.blas.set_math_mode)(handle.get(), math as u32) })?;
        // SAFETY: the handle is alive.
        done("cublasSetAtomicsMode", unsafe { (self.blas.set_atomics_mode)(handle.get(), atomics as u32) })
    }

    /// Enqueues `C = A * B` of square matrices.
    ///
    /// # Safety
    /// The caller must ensure that the handle is alive, that the addresses are those of live matrices of this type and
    /// size until the product is done, and that C does not overlap A and B.
    #[inline]
    pub(crate) unsafe fn gemm(&self, handle: u64, kind: i32, size: i32, [a, b, c]: [u64; 3]) -> Result<()> {
        let compute = cublasComputeType_t::CUBLAS_COMPUTE_32F as i32;
        let algorithm = cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT as i32;
        let (n, one, zero) = (size, 1.0_f32, 0.0_f32);
        // SAFETY: The handle is alive, and the factors outlive the call. The caller promises that the matrices are
        // valid.
        let code = unsafe {
            (self.blas.gemm)(handle, 0, 0, n, n, n, &one, a, kind, n, b, kind, n, &zero, c, kind, n, compute, algorithm)
        };
        done("cublasGemmEx", code)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: `open` retained the context once. An error cannot be reported here.
        unsafe { (self.cuda.context_release)(self.device) };
    }
}

/// Keeps the context current in this thread until it is dropped.
pub(crate) struct Current<'r>(&'r Raw);

impl Drop for Current<'_> {
    fn drop(&mut self) {
        // Pops the context that `enter` pushed. An error cannot be reported here.
        let _ = self.0.leave();
    }
}

/// An object of the vendor, destroyed when dropped.
pub(crate) struct Owned {
    raw: u64,
    destroy: unsafe extern "C" fn(u64) -> i32,
}

impl Owned {
    fn make(
        call: &'static str,
        destroy: unsafe extern "C" fn(u64) -> i32,
        make: impl FnOnce(&mut u64) -> i32,
    ) -> Result<Self> {
        let mut raw = 0;
        done(call, make(&mut raw))?;
        Ok(Self { raw, destroy })
    }

    #[inline]
    pub(crate) fn get(&self) -> u64 {
        self.raw
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: The call that matches `destroy` created the object, and only this call destroys it. An error cannot
        // be reported here.
        unsafe { (self.destroy)(self.raw) };
    }
}

/// Returns the vendor's number of an element type.
pub(crate) fn kind_of(data_type: DataType) -> Result<i32> {
    Ok(match data_type {
        DataType::F32 => cudaDataType_t::CUDA_R_32F as i32,
        DataType::Bf16 => cudaDataType_t::CUDA_R_16BF as i32,
        other => bail!("no raw product of {other:?} is measured"),
    })
}

/// A product through cuBLASLt whose algorithm is chosen once.
pub(crate) struct LtProduct<'r> {
    raw: &'r Raw,
    handle: Owned,
    product: Owned,
    layout: Owned,
    choice: Choice,
    workspace: Owned,
    workspace_bytes: usize,
}

impl<'r> LtProduct<'r> {
    /// A product of square matrices.
    pub(crate) fn new(raw: &'r Raw, kind: i32, size: usize, workspace_bytes: usize) -> Result<Self> {
        let lt = &raw.lt;
        let compute = cublasComputeType_t::CUBLAS_COMPUTE_32F as i32;
        let scale = cudaDataType_t::CUDA_R_32F as i32;
        let (n, ld) = (u64::try_from(size)?, i64::try_from(size)?);
        let handle = Owned::make("cublasLtCreate", lt.destroy, |out| {
            // SAFETY: the call writes one number that lives until it returns, as do those below.
            unsafe { (lt.create)(out) }
        })?;
        let product = Owned::make("cublasLtMatmulDescCreate", lt.product_destroy, |out| {
            // SAFETY: as above.
            unsafe { (lt.product_create)(out, compute, scale) }
        })?;
        let layout = Owned::make("cublasLtMatrixLayoutCreate", lt.layout_destroy, |out| {
            // SAFETY: as above.
            unsafe { (lt.layout_create)(out, kind, n, n, ld) }
        })?;
        let preference = Owned::make("cublasLtMatmulPreferenceCreate", lt.wish_destroy, |out| {
            // SAFETY: as above.
            unsafe { (lt.wish_create)(out) }
        })?;
        let most = cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as u32;
        // SAFETY: The preference is alive, and the value has the given size.
        let code = unsafe { (lt.wish_set)(preference.get(), most, &workspace_bytes, size_of::<usize>()) };
        done("cublasLtMatmulPreferenceSetAttribute", code)?;
        let (mut choice, mut found) = (Choice::default(), 0);
        let (l, p) = (layout.get(), product.get());
        // SAFETY: All objects are alive, and the buffer holds the one requested result.
        let code = unsafe { (lt.choose)(handle.get(), p, l, l, l, l, preference.get(), 1, &mut choice, &mut found) };
        done("cublasLtMatmulAlgoGetHeuristic", code)?;
        ensure!(found == 1 && choice.state == 0, "cuBLASLt found no algorithm for {size} x {size}");
        let workspace = raw.memory(workspace_bytes)?;
        Ok(Self { raw, handle, product, layout, choice, workspace, workspace_bytes })
    }

    /// Enqueues the product.
    ///
    /// # Safety
    /// The same as for [`Raw::gemm`].
    #[inline]
    pub(crate) unsafe fn run(&self, stream: &Owned, [a, b, c]: [u64; 3]) -> Result<()> {
        let (one, zero, layout) = (1.0_f32, 0.0_f32, self.layout.get());
        // SAFETY: All objects are alive and match. The caller promises that the matrices are valid.
        let code = unsafe {
            (self.raw.lt.matmul)(
                self.handle.get(),
                self.product.get(),
                &one,
                a,
                layout,
                b,
                layout,
                &zero,
                c,
                layout,
                c,
                layout,
                &self.choice.algorithm,
                self.workspace.get(),
                self.workspace_bytes,
                stream.get(),
            )
        };
        done("cublasLtMatmul", code)
    }
}
