//! The calls of the table.

use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};

use highwater_simulated_harness::Answer;
use highwater_simulated_harness::log::need;
use highwater_simulated_harness::values::{F32, IN_32F, Shape};

use crate::calls::{Access, Handle, IpcHandle, Pointer, Properties, bits, blas, cu, lt, ok};
use crate::memory::{Memory, NEW, OLD, SIZE, host, map};
use crate::plan::Plan;
use crate::rig::{READ_WRITE, event, load, memory, pages, pinned, store, stream};
use crate::setting::{GLOBAL, RELAXED, THREAD_LOCAL, Things, seen_bytes};

/// The memory that a call takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sides {
    /// None that the cell selects.
    None,
    Any,
    FromHost,
    ToHost,
    OnDevice,
    /// A destination only.
    Fill,
}

/// A call, with what it needs and what it leaves.
pub(crate) struct Call {
    pub(crate) name: &'static str,
    /// Makes what the call needs beside the objects of every cell.
    pub(crate) prepare: fn(&mut Things<'_>) -> Answer,
    pub(crate) call: fn(&Things<'_>) -> u32,
    /// Frees what `prepare` and the call made, and describes the result.
    pub(crate) finish: fn(&Things<'_>) -> Answer<String>,
    /// Whether a graph that recorded the call is launched.
    pub(crate) launches: bool,
    /// Whether the call destroys its stream.
    pub(crate) destroys: bool,
    /// Whether the answer with another context current depends on the kernels that are loaded there.
    pub(crate) depends_on_loading: bool,
    pub(crate) is_far: bool,
    pub(crate) sides: Sides,
}

impl Call {
    const fn new(name: &'static str, call: fn(&Things<'_>) -> u32) -> Self {
        Self {
            name,
            prepare: |_| Ok(()),
            call,
            finish: |_| Ok(String::new()),
            launches: false,
            destroys: false,
            depends_on_loading: false,
            is_far: false,
            sides: Sides::None,
        }
    }

    /// A copy or a fill, whose bytes are seen.
    const fn work(name: &'static str, sides: Sides, call: fn(&Things<'_>) -> u32) -> Self {
        let mut work = Self::new(name, call).then(|t| match t.dst {
            0 => Ok(String::new()),
            at => seen_bytes(t, at, t.bytes),
        });
        work.launches = true;
        work.sides = sides;
        work
    }

    /// A product of matrices of ones.
    const fn product(name: &'static str, call: fn(&Things<'_>) -> u32) -> Self {
        let mut product = Self::new(name, call).with(with_product).then(seen_values);
        product.launches = true;
        product.depends_on_loading = true;
        product
    }

    const fn with(mut self, prepare: fn(&mut Things<'_>) -> Answer) -> Self {
        self.prepare = prepare;
        self
    }

    const fn then(mut self, finish: fn(&Things<'_>) -> Answer<String>) -> Self {
        self.finish = finish;
        self
    }

    const fn far(mut self) -> Self {
        self.is_far = true;
        self
    }
}

/// The types of a graph's nodes, sorted.
pub(crate) fn nodes(graph: Handle) -> Answer<Vec<u32>> {
    let mut count = 0;
    ok!(cu cuGraphGetNodes(graph, null_mut(), &mut count));
    let mut nodes = vec![0; count];
    // A place for no nodes is refused.
    if count > 0 {
        ok!(cu cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count));
    }
    let mut types = Vec::new();
    for node in nodes {
        let mut of = 0;
        ok!(cu cuGraphNodeGetType(node, &mut of));
        types.push(of);
    }
    types.sort_unstable();
    Ok(types)
}

fn silent() -> Answer<String> {
    Ok(String::new())
}

// Streams.

fn begin(t: &Things<'_>, mode: u32) -> u32 {
    cu!(cuStreamBeginCapture_v2(t.stream, mode))
}

fn end(t: &Things<'_>) -> u32 {
    let mut graph = 0;
    let code = cu!(cuStreamEndCapture(t.stream, &mut graph));
    t.note.store(u64::from(graph != 0), Ordering::Release);
    t.keep(code, graph as u64)
}

unsafe extern "C" fn count(counter: Pointer) {
    // SAFETY: counters are never freed.
    unsafe { &*counter.cast::<AtomicU64>() }.fetch_add(1, Ordering::SeqCst);
}

/// A graph that fills 64 bytes of the destination.
fn with_graph(t: &mut Things<'_>) -> Answer {
    ok!(cu cuStreamBeginCapture_v2(t.side, THREAD_LOCAL));
    ok!(cu cuMemsetD8Async(t.dst, NEW, 64, t.side));
    ok!(cu cuStreamEndCapture(t.side, &mut t.graph));
    ok!(cu cuGraphInstantiateWithFlags(&mut t.executable, t.graph, 0));
    Ok(())
}

fn with_pool_block(t: &mut Things<'_>) -> Answer {
    ok!(cu cuMemAllocAsync(&mut t.given, 4096, t.rig.stage));
    ok!(cu cuStreamSynchronize(t.rig.stage));
    Ok(())
}

/// Frees the block of `prepare`, unless the call did: recorded frees were not executed.
fn free_given(t: &Things<'_>) -> Answer<String> {
    if t.given != 0 && t.made() == 0 {
        ok!(cu cuMemFree_v2(t.given));
    }
    silent()
}

/// Notes that the call has freed what it was given.
fn spent(t: &Things<'_>, code: u32) -> u32 {
    t.keep(code, u64::from(code == 0))
}

pub(crate) const STREAM_CALLS: &[Call] = &[
    Call::new("cuStreamQuery", |t| cu!(cuStreamQuery(t.stream))),
    Call::new("cuStreamSynchronize", |t| cu!(cuStreamSynchronize(t.stream))),
    Call::new("cuStreamIsCapturing", |t| {
        let mut status = 9;
        let code = cu!(cuStreamIsCapturing(t.stream, &mut status));
        t.tell(code, u64::from(status))
    }),
    Call::new("cuStreamGetCtx", |t| {
        let mut context = 0;
        let code = cu!(cuStreamGetCtx(t.stream, &mut context));
        t.tell(code, u64::from(context == t.rig.context))
    }),
    Call::new("cuStreamGetPriority", |t| {
        let mut priority = 0;
        let code = cu!(cuStreamGetPriority(t.stream, &mut priority));
        t.tell(code, u64::from(priority.unsigned_abs()))
    }),
    Call::new("cuStreamGetFlags", |t| {
        let mut flags = 9;
        let code = cu!(cuStreamGetFlags(t.stream, &mut flags));
        t.tell(code, u64::from(flags))
    }),
    Call::new("cuStreamGetId", |t| cu!(cuStreamGetId(t.stream, &mut 0))),
    Call::new("cuStreamBeginCapture(global)", |t| begin(t, GLOBAL)),
    Call::new("cuStreamBeginCapture(thread-local)", |t| begin(t, THREAD_LOCAL)),
    Call::new("cuStreamBeginCapture(relaxed)", |t| begin(t, RELAXED)),
    Call::new("cuStreamEndCapture", end).then(|t| {
        if t.made() != 0 {
            ok!(cu cuGraphDestroy(t.made() as Handle));
        }
        silent()
    }),
    Call::new("cuStreamWaitEvent(done)", |t| cu!(cuStreamWaitEvent(t.stream, t.done, 0))),
    Call::new("cuStreamWaitEvent(done, external)", |t| cu!(cuStreamWaitEvent(t.stream, t.done, 1))),
    Call::new("cuStreamWaitEvent(unknown flag)", |t| cu!(cuStreamWaitEvent(t.stream, t.done, 8))),
    Call::new("cuEventRecord", |t| cu!(cuEventRecord(t.event, t.stream)))
        .then(|t| Ok(format!("event {}", cu!(cuEventQuery(t.event))))),
    {
        let mut destroy = Call::new("cuStreamDestroy", |t| {
            let code = cu!(cuStreamDestroy_v2(t.stream));
            t.is_gone.store(code == 0, Ordering::Release);
            code
        });
        destroy.destroys = true;
        destroy
    },
    {
        let mut launch = Call::new("cuLaunchHostFunc", |t| cu!(cuLaunchHostFunc(t.stream, Some(count), host(t.given))))
            .with(|t| {
                // Never freed, because a stream may count later than the cell ends.
                let counter: &'static AtomicU64 = Box::leak(Box::default());
                t.given = std::ptr::from_ref(counter).expose_provenance() as u64;
                Ok(())
            })
            .then(|t| {
                // SAFETY: the address is that of the counter, which is never freed.
                let counter = unsafe { &*host(t.given).cast::<AtomicU64>() };
                Ok(format!("counted {}", counter.load(Ordering::SeqCst)))
            });
        launch.launches = true;
        launch
    },
    {
        let mut launch = Call::new("cuGraphLaunch", |t| cu!(cuGraphLaunch(t.executable, t.stream)))
            .with(with_graph)
            .then(|t| seen_bytes(t, t.dst, 64));
        launch.launches = true;
        launch
    },
    Call::new("cuMemAllocAsync", |t| {
        let mut address = 0;
        let code = cu!(cuMemAllocAsync(&mut address, 4096, t.stream));
        t.keep(code, if t.origin == t.stream { 0 } else { address })
    })
    .then(free_unless_recorded),
    Call::new("cuMemAllocAsync(0 bytes)", |t| cu!(cuMemAllocAsync(&mut 0, 0, t.stream))),
    Call::new("cuMemFreeAsync(pool)", |t| spent(t, cu!(cuMemFreeAsync(t.given, t.stream))))
        .with(with_pool_block)
        .then(free_given),
    Call::new("cuMemFreeAsync(plain)", |t| spent(t, cu!(cuMemFreeAsync(t.given, t.stream))))
        .with(|t| memory(4096).map(|address| t.given = address))
        .then(free_given),
    Call::new("cuMemFreeAsync(null)", |t| cu!(cuMemFreeAsync(0, t.stream))),
    Call::new("cublasSetStream", |t| blas!(cublasSetStream_v2(t.blas, t.stream))).with(with_blas),
    Call::product("cublasSgemm", |t| {
        let (one, zero) = (1f32, 0f32);
        let [a, b, c] = matrices(t);
        blas!(cublasSgemm_v2(t.blas, 0, 0, 16, 16, 16, bits(&one), a, 16, b, 16, bits(&zero), c, 16))
    }),
    Call::product("cublasGemmEx", |t| {
        let (one, zero) = (1f32, 0f32);
        let [a, b, c] = matrices(t);
        blas!(cublasGemmEx(
            t.blas,
            0,
            0,
            16,
            16,
            16,
            bits(&one),
            a,
            F32,
            16,
            b,
            F32,
            16,
            bits(&zero),
            c,
            F32,
            16,
            IN_32F,
            -1
        ))
    }),
    Call::product("cublasGemmStridedBatchedEx", |t| {
        let (one, zero) = (1f32, 0f32);
        let [a, b, c] = matrices(t);
        blas!(cublasGemmStridedBatchedEx(
            t.blas,
            0,
            0,
            16,
            16,
            16,
            bits(&one),
            a,
            F32,
            16,
            0,
            b,
            F32,
            16,
            0,
            bits(&zero),
            c,
            F32,
            16,
            256,
            2,
            IN_32F,
            -1
        ))
    }),
    Call::product("cublasLtMatmul", |t| {
        let (one, zero) = (1f32.to_ne_bytes(), 0f32.to_ne_bytes());
        let Some((plan, found)) = &t.lt else { return u32::MAX };
        plan.run(found, (&one, &zero), matrices(t), (0, 0), t.stream)
    })
    .with(with_plan),
];

/// A handle on the stream of the call, with a workspace.
fn with_blas(t: &mut Things<'_>) -> Answer {
    t.with_blas()
}

/// Returns the addresses of the operands.
fn matrices(t: &Things<'_>) -> [u64; 3] {
    [t.src, t.src + 4096, t.dst]
}

fn with_product(t: &mut Things<'_>) -> Answer {
    t.with_blas()?;
    with_ones(t)
}

fn with_plan(t: &mut Things<'_>) -> Answer {
    let plan = Plan::new(F32, F32, IN_32F, &Shape::packed(16, 16, 16))?;
    plan.limit_workspace(0)?;
    let (code, found, heuristic) = plan.find();
    if (code, found) != (0, 1) {
        return Err(format!("the heuristic answered {code} and found {found}"));
    }
    t.lt = Some((plan, heuristic));
    with_ones(t)
}

fn with_ones(t: &Things<'_>) -> Answer {
    let [a, b, _] = matrices(t);
    store(a, &[1f32; 256], t.rig.stage)?;
    store(b, &[1f32; 256], t.rig.stage)
}

fn seen_values(t: &Things<'_>) -> Answer<String> {
    let mut values = load::<f32>(t.dst, 256, t.rig.stage)?;
    values.dedup();
    values.truncate(3);
    let old = f32::from_ne_bytes([OLD; 4]);
    let text: Vec<_> =
        values.iter().map(|value| if *value == old { "old".to_owned() } else { value.to_string() }).collect();
    Ok(format!("values {}", text.join(" ")))
}

/// Frees what a call allocated, if it was executed and not recorded.
fn free_unless_recorded(t: &Things<'_>) -> Answer<String> {
    let address = t.made();
    if address != 0 && !t.was_recorded() {
        ok!(cu cuMemFree_v2(address));
    }
    silent()
}

// Copies and fills.

pub(crate) const COPY_CALLS: &[Call] = &[
    Call::work("cuMemcpyAsync", Sides::Any, |t| cu!(cuMemcpyAsync(t.dst, t.src, t.bytes, t.stream))),
    Call::work("cuMemcpyHtoDAsync", Sides::FromHost, |t| {
        cu!(cuMemcpyHtoDAsync_v2(t.dst, host(t.src), t.bytes, t.stream))
    }),
    Call::work("cuMemcpyDtoHAsync", Sides::ToHost, |t| {
        cu!(cuMemcpyDtoHAsync_v2(host(t.dst), t.src, t.bytes, t.stream))
    }),
    Call::work("cuMemcpyDtoDAsync", Sides::OnDevice, |t| cu!(cuMemcpyDtoDAsync_v2(t.dst, t.src, t.bytes, t.stream))),
    Call::work("cuMemcpyPeerAsync", Sides::OnDevice, |t| {
        let context = t.rig.context;
        cu!(cuMemcpyPeerAsync(t.dst, context, t.src, context, t.bytes, t.stream))
    }),
    Call::work("cuMemsetD8Async", Sides::Fill, |t| cu!(cuMemsetD8Async(t.dst, NEW, t.bytes, t.stream))),
    Call::work("cuMemsetD16Async", Sides::Fill, |t| {
        cu!(cuMemsetD16Async(t.dst, 0x2222, t.bytes.div_ceil(2), t.stream))
    }),
    Call::work("cuMemsetD32Async", Sides::Fill, |t| {
        cu!(cuMemsetD32Async(t.dst, 0x2222_2222, t.bytes.div_ceil(4), t.stream))
    }),
];

// Events.

pub(crate) const EVENT_CALLS: &[Call] = &[
    Call::new("cuEventQuery", |t| cu!(cuEventQuery(t.event))),
    Call::new("cuEventSynchronize", |t| cu!(cuEventSynchronize(t.event))),
    Call::new("cuEventElapsedTime", |t| {
        let mut milliseconds = -1f32;
        let code = cu!(cuEventElapsedTime(&mut milliseconds, t.done, t.event));
        if code == 0 { t.tell(code, u64::from(milliseconds >= 0.0)) } else { code }
    }),
    Call::new("cuEventRecord(another stream)", |t| cu!(cuEventRecord(t.event, t.side)))
        .then(|t| Ok(format!("event {}", cu!(cuEventQuery(t.event))))),
    Call::new("cuStreamWaitEvent(another stream)", |t| cu!(cuStreamWaitEvent(t.side, t.event, 0)))
        .then(|t| Ok(format!("that stream {}", cu!(cuStreamSynchronize(t.side))))),
    Call::new("cuEventDestroy", |t| {
        let code = cu!(cuEventDestroy_v2(t.event));
        t.is_event_gone.store(code == 0, Ordering::Release);
        code
    }),
];

// Calls without a stream.

/// Keeps an address that a call allocated, for `free_made`.
fn allocate(t: &Things<'_>, bytes: usize) -> u32 {
    let mut address = 0;
    let code = cu!(cuMemAlloc_v2(&mut address, bytes));
    t.keep(code, address)
}

fn free_made(t: &Things<'_>) -> Answer<String> {
    if t.made() != 0 {
        ok!(cu cuMemFree_v2(t.made()));
    }
    silent()
}

fn free_made_host(t: &Things<'_>) -> Answer<String> {
    if t.made() != 0 {
        ok!(cu cuMemFreeHost(host(t.made())));
    }
    silent()
}

fn free_given_host(t: &Things<'_>) -> Answer<String> {
    if t.made() == 0 {
        ok!(cu cuMemFreeHost(host(t.given)));
    }
    silent()
}

fn with_plain(t: &mut Things<'_>) -> Answer {
    t.given = memory(4096)?;
    Ok(())
}

fn with_pinned(t: &mut Things<'_>) -> Answer {
    t.given = pinned(4096)?.expose_provenance() as u64;
    Ok(())
}

fn with_pages(t: &mut Things<'_>) -> Answer {
    t.given = pages(2, READ_WRITE)?.expose_provenance() as u64;
    Ok(())
}

fn with_registered(t: &mut Things<'_>) -> Answer {
    with_pages(t)?;
    ok!(cu cuMemHostRegister_v2(host(t.given), 8192, 1));
    Ok(())
}

/// Ends the registration of the pages, if there is one, and unmaps them.
fn unmap_pages(t: &Things<'_>) -> Answer<String> {
    let code = cu!(cuMemHostUnregister(host(t.given)));
    // SAFETY: the pages were mapped for this cell, and its work is done.
    unsafe { libc::munmap(host(t.given), 8192) };
    Ok(format!("then unregister {code}"))
}

fn host_allocate(t: &Things<'_>, bytes: usize, flags: u32) -> u32 {
    let mut address = null_mut();
    let code = cu!(cuMemHostAlloc(&mut address, bytes, flags));
    t.keep(code, address.expose_provenance() as u64)
}

// Attributes of memory, numbered as in NVIDIA's header.
const TYPE: u32 = 2;
const IS_MANAGED: u32 = 8;
const DEVICE: u32 = 9;
const IS_LEGACY: u32 = 10;
const HANDLE_KINDS: u32 = 14;
const POOL: u32 = 17;

fn attribute(t: &Things<'_>, kind: Memory, attribute: u32) -> u32 {
    let mut value = [0u64; 4];
    let code = cu!(cuPointerGetAttribute(value.as_mut_ptr().cast(), attribute, t.rig.blocks.dst(kind)));
    // The memory's type, the device's ordinal and the kinds of handles are numbers. Addresses, contexts and pools differ between
    // processes. For a pool, the answer says only whether one exists.
    match attribute {
        TYPE | DEVICE | HANDLE_KINDS if code == 0 => t.tell(code, value[0] & 0xffff_ffff),
        IS_MANAGED | IS_LEGACY if code == 0 => t.tell(code, value[0] & 1),
        POOL if code == 0 => t.tell(code, u64::from(value[0] != 0)),
        _ => code,
    }
}

fn range(t: &Things<'_>, address: u64) -> u32 {
    let (mut base, mut bytes) = (0, 0);
    let code = cu!(cuMemGetAddressRange_v2(&mut base, &mut bytes, address));
    if code == 0 { t.tell(code, bytes as u64) } else { code }
}

fn retain(t: &Things<'_>, address: u64) -> u32 {
    let mut handle = 0;
    let code = cu!(cuMemRetainAllocationHandle(&mut handle, address));
    t.keep(code, handle)
}

fn export(address: u64) -> u32 {
    cu!(cuIpcGetMemHandle(&mut IpcHandle([0; 8]), address))
}

fn create_stream(t: &Things<'_>, flags: u32) -> u32 {
    let mut made = 0;
    let code = cu!(cuStreamCreate(&mut made, flags));
    t.keep(code, made as u64)
}

fn destroy_made_stream(t: &Things<'_>) -> Answer<String> {
    if t.made() != 0 {
        ok!(cu cuStreamDestroy_v2(t.made() as Handle));
    }
    silent()
}

fn create_event(t: &Things<'_>, flags: u32) -> u32 {
    let mut made = 0;
    let code = cu!(cuEventCreate(&mut made, flags));
    t.keep(code, made as u64)
}

fn destroy_made_event(t: &Things<'_>) -> Answer<String> {
    if t.made() != 0 {
        ok!(cu cuEventDestroy_v2(t.made() as Handle));
    }
    silent()
}

fn with_stream(t: &mut Things<'_>) -> Answer {
    t.given = stream()? as u64;
    Ok(())
}

fn destroy_given_stream(t: &Things<'_>) -> Answer<String> {
    if t.made() == 0 {
        ok!(cu cuStreamDestroy_v2(t.given as Handle));
    }
    silent()
}

fn with_event(t: &mut Things<'_>, flags: u32) -> Answer {
    let made = event(flags)?;
    t.events.push(made);
    t.given = made as u64;
    Ok(())
}

fn create_allocation(t: &Things<'_>, bytes: usize) -> u32 {
    let mut handle = 0;
    let code = cu!(cuMemCreate(&mut handle, bytes, &Properties::with_handles(1), 0));
    t.keep(code, handle)
}

fn release_made(t: &Things<'_>) -> Answer<String> {
    if t.made() != 0 {
        ok!(cu cuMemRelease(t.made()));
    }
    silent()
}

fn with_allocation(t: &mut Things<'_>) -> Answer {
    ok!(cu cuMemCreate(&mut t.given, SIZE, &Properties::with_handles(1), 0));
    Ok(())
}

fn release_given(t: &Things<'_>) -> Answer<String> {
    if t.made() == 0 {
        ok!(cu cuMemRelease(t.given));
    }
    silent()
}

fn reserve(t: &Things<'_>, bytes: usize) -> u32 {
    let mut address = 0;
    let code = cu!(cuMemAddressReserve(&mut address, bytes, 0, 0, 0));
    t.keep(code, address)
}

fn with_reservation(t: &mut Things<'_>) -> Answer {
    ok!(cu cuMemAddressReserve(&mut t.given, SIZE, 0, 0, 0));
    Ok(())
}

fn free_given_addresses(t: &Things<'_>) -> Answer<String> {
    if t.made() == 0 {
        ok!(cu cuMemAddressFree(t.given, SIZE));
    }
    silent()
}

/// An allocation in `bytes`, and addresses for it.
fn with_both(t: &mut Things<'_>) -> Answer {
    with_reservation(t)?;
    let mut handle = 0;
    ok!(cu cuMemCreate(&mut handle, SIZE, &Properties::with_handles(1), 0));
    t.bytes = handle as usize;
    Ok(())
}

fn end_both(t: &Things<'_>) -> Answer<String> {
    if t.made() != 0 {
        ok!(cu cuMemUnmap(t.given, SIZE));
    }
    ok!(cu cuMemRelease(t.bytes as u64));
    ok!(cu cuMemAddressFree(t.given, SIZE));
    silent()
}

fn with_mapping(t: &mut Things<'_>) -> Answer {
    let (address, handle) = map()?;
    t.given = address;
    ok!(cu cuMemRelease(handle));
    Ok(())
}

fn end_mapping(t: &Things<'_>) -> Answer<String> {
    if t.made() == 0 {
        ok!(cu cuMemUnmap(t.given, SIZE));
    }
    ok!(cu cuMemAddressFree(t.given, SIZE));
    silent()
}

fn export_descriptor(t: &Things<'_>, kind: u32) -> u32 {
    let mut descriptor = -1i32;
    let code = cu!(cuMemExportToShareableHandle(std::ptr::from_mut(&mut descriptor).cast(), t.given, kind, 0));
    if code == 0 {
        // SAFETY: the driver has just made this descriptor.
        unsafe { libc::close(descriptor) };
    }
    code
}

fn default_pool() -> Handle {
    let mut pool = 0;
    cu!(cuDeviceGetDefaultMemPool(&mut pool, 0));
    pool
}

fn with_pool(t: &mut Things<'_>) -> Answer {
    t.given = default_pool() as u64;
    Ok(())
}

fn with_lt(t: &mut Things<'_>) -> Answer {
    let mut handle = 0;
    need("cublasLtCreate", lt!(cublasLtCreate(&mut handle)))?;
    t.given = handle as u64;
    Ok(())
}

fn destroy_given_lt(t: &Things<'_>) -> Answer<String> {
    if t.made() == 0 {
        need("cublasLtDestroy", lt!(cublasLtDestroy(t.given as Handle)))?;
    }
    silent()
}

pub(crate) const PLAIN_CALLS: &[Call] = &[
    Call::new("cuInit", |_| cu!(cuInit(0))),
    Call::new("cuDriverGetVersion", |_| cu!(cuDriverGetVersion(&mut 0))),
    Call::new("cuDeviceGetCount", |_| cu!(cuDeviceGetCount(&mut 0))),
    Call::new("cuDeviceGet", |_| cu!(cuDeviceGet(&mut 0, 0))),
    Call::new("cuDeviceGetAttribute", |_| cu!(cuDeviceGetAttribute(&mut 0, 1, 0))),
    Call::new("cuDeviceTotalMem", |_| cu!(cuDeviceTotalMem_v2(&mut 0, 0))),
    Call::new("cuDeviceCanAccessPeer(itself)", |t| {
        let mut can = 9;
        let code = cu!(cuDeviceCanAccessPeer(&mut can, 0, 0));
        t.tell(code, can as u64)
    }),
    Call::new("cuDevicePrimaryCtxRetain", |t| {
        let mut context = 0;
        let code = cu!(cuDevicePrimaryCtxRetain(&mut context, 0));
        t.keep(code, context as u64);
        t.tell(code, u64::from(context == t.rig.context))
    })
    .then(|t| {
        if t.made() != 0 {
            ok!(cu cuDevicePrimaryCtxRelease_v2(0));
        }
        silent()
    }),
    Call::new("cuDevicePrimaryCtxRelease(of two)", |t| spent(t, cu!(cuDevicePrimaryCtxRelease_v2(0))))
        .with(|_| {
            ok!(cu cuDevicePrimaryCtxRetain(&mut 0, 0));
            Ok(())
        })
        .then(|t| {
            if t.made() == 0 {
                ok!(cu cuDevicePrimaryCtxRelease_v2(0));
            }
            silent()
        }),
    Call::new("cuDevicePrimaryCtxGetState", |t| {
        let (mut flags, mut active) = (9, 9);
        let code = cu!(cuDevicePrimaryCtxGetState(0, &mut flags, &mut active));
        t.tell(code, active as u64)
    }),
    Call::new("cuCtxGetCurrent", |t| {
        let mut context = 9;
        let code = cu!(cuCtxGetCurrent(&mut context));
        t.tell(code, if context == 0 { 0 } else { 1 + u64::from(context == t.rig.context) })
    }),
    Call::new("cuCtxSetCurrent", |t| cu!(cuCtxSetCurrent(t.rig.context))),
    Call::new("cuCtxPushCurrent", |t| {
        let pushed = cu!(cuCtxPushCurrent_v2(t.rig.context));
        let popped = if pushed == 0 { cu!(cuCtxPopCurrent_v2(&mut 0)) } else { 0 };
        t.tell(pushed, u64::from(popped))
    }),
    Call::new("cuCtxGetDevice", |t| {
        let mut device = 9;
        let code = cu!(cuCtxGetDevice(&mut device));
        if code == 0 { t.tell(code, device as u64) } else { code }
    }),
    Call::new("cuCtxSynchronize", |_| cu!(cuCtxSynchronize())),
    Call::new("cuCtxGetStreamPriorityRange", |_| cu!(cuCtxGetStreamPriorityRange(&mut 0, &mut 0))),
    // Access of the current context to itself, because access between two devices lasts, and later cells would depend on it.
    Call::new("cuCtxEnablePeerAccess(itself)", |_| {
        let mut current = 0;
        cu!(cuCtxGetCurrent(&mut current));
        cu!(cuCtxEnablePeerAccess(current, 0))
    }),
    Call::new("cuStreamCreate(blocking)", |t| create_stream(t, 0)).then(destroy_made_stream),
    Call::new("cuStreamCreate(non-blocking)", |t| create_stream(t, 1)).then(destroy_made_stream),
    Call::new("cuStreamCreateWithPriority", |t| {
        let mut made = 0;
        let code = cu!(cuStreamCreateWithPriority(&mut made, 1, -1));
        t.keep(code, made as u64)
    })
    .then(destroy_made_stream),
    Call::new("cuStreamDestroy(another)", |t| spent(t, cu!(cuStreamDestroy_v2(t.given as Handle))))
        .with(with_stream)
        .then(destroy_given_stream),
    Call::new("cuThreadExchangeStreamCaptureMode", |t| {
        let mut mode = RELAXED;
        let code = cu!(cuThreadExchangeStreamCaptureMode(&mut mode));
        t.tell(code, u64::from(mode));
        cu!(cuThreadExchangeStreamCaptureMode(&mut mode)) + code
    }),
    Call::new("cuGraphInstantiate", |t| {
        let mut made = 0;
        let code = cu!(cuGraphInstantiateWithFlags(&mut made, t.graph, 0));
        t.keep(code, made as u64)
    })
    .with(with_graph)
    .then(|t| {
        if t.made() != 0 {
            ok!(cu cuGraphExecDestroy(t.made() as Handle));
        }
        silent()
    }),
    Call::new("cuGraphGetNodes", |t| {
        let mut count = 0;
        let code = cu!(cuGraphGetNodes(t.graph, null_mut(), &mut count));
        t.tell(code, count as u64)
    })
    .with(with_graph),
    Call::new("cuGraphGetNodes(room for none)", |t| cu!(cuGraphGetNodes(t.graph, &mut 0, &mut 0))).with(with_graph),
    Call::new("cuGraphDestroy", |t| spent(t, cu!(cuGraphDestroy(t.given as Handle))))
        .with(|t| {
            with_graph(t)?;
            t.given = std::mem::take(&mut t.graph) as u64;
            Ok(())
        })
        .then(|t| {
            if t.made() == 0 {
                ok!(cu cuGraphDestroy(t.given as Handle));
            }
            silent()
        }),
    Call::new("cuGraphExecDestroy", |t| spent(t, cu!(cuGraphExecDestroy(t.given as Handle))))
        .with(|t| {
            with_graph(t)?;
            t.given = std::mem::take(&mut t.executable) as u64;
            Ok(())
        })
        .then(|t| {
            if t.made() == 0 {
                ok!(cu cuGraphExecDestroy(t.given as Handle));
            }
            silent()
        }),
    Call::new("cuEventCreate", |t| create_event(t, 0)).then(destroy_made_event),
    Call::new("cuEventCreate(for other processes)", |t| create_event(t, 6)).then(destroy_made_event),
    Call::new("cuMemAlloc", |t| allocate(t, 4096)).then(free_made),
    Call::new("cuMemAlloc(2 MiB)", |t| allocate(t, SIZE)).then(free_made),
    Call::new("cuMemFree(plain)", |t| spent(t, cu!(cuMemFree_v2(t.given)))).with(with_plain).then(free_given),
    Call::new("cuMemFree(2 MiB)", |t| spent(t, cu!(cuMemFree_v2(t.given))))
        .with(|t| memory(SIZE).map(|address| t.given = address))
        .then(free_given),
    Call::new("cuMemFree(pool)", |t| spent(t, cu!(cuMemFree_v2(t.given)))).with(with_pool_block).then(free_given),
    Call::new("cuMemGetInfo", |_| cu!(cuMemGetInfo_v2(&mut 0, &mut 0))),
    Call::new("cuMemGetAddressRange(plain)", |t| range(t, t.rig.blocks.dst(Memory::Plain))),
    Call::new("cuMemGetAddressRange(mapped)", |t| range(t, t.rig.blocks.dst(Memory::Mapped))),
    Call::new("cuDeviceGetDefaultMemPool", |_| cu!(cuDeviceGetDefaultMemPool(&mut 0, 0))),
    Call::new("cuMemPoolGetAttribute(threshold)", |t| {
        let mut value = 9u64;
        let code = cu!(cuMemPoolGetAttribute(t.given as Handle, 4, std::ptr::from_mut(&mut value).cast()));
        t.tell(code, value)
    })
    .with(with_pool),
    Call::new("cuMemPoolSetAttribute(threshold)", |t| {
        cu!(cuMemPoolSetAttribute(t.given as Handle, 4, std::ptr::from_mut(&mut 0u64).cast()))
    })
    .with(with_pool),
    Call::new("cuMemPoolTrimTo", |t| cu!(cuMemPoolTrimTo(t.given as Handle, 1 << 30))).with(with_pool),
    Call::new("cuMemHostAlloc", |t| host_allocate(t, 4096, 1)).then(free_made_host),
    Call::new("cuMemFreeHost", |t| spent(t, cu!(cuMemFreeHost(host(t.given))))).with(with_pinned).then(free_given_host),
    Call::new("cuMemHostRegister", |t| cu!(cuMemHostRegister_v2(host(t.given), 8192, 1)))
        .with(with_pages)
        .then(unmap_pages),
    Call::new("cuMemHostUnregister", |t| cu!(cuMemHostUnregister(host(t.given))))
        .with(with_registered)
        .then(unmap_pages),
    Call::new("cuMemHostGetDevicePointer(pinned)", |t| {
        cu!(cuMemHostGetDevicePointer_v2(&mut 0, host(t.rig.blocks.dst(Memory::Pinned)), 0))
    }),
    Call::new("cuPointerGetAttribute(type, plain)", |t| attribute(t, Memory::Plain, 2)),
    Call::new("cuPointerGetAttribute(context, plain)", |t| attribute(t, Memory::Plain, 1)),
    Call::new("cuPointerGetAttribute(device, pinned)", |t| attribute(t, Memory::Pinned, 9)),
    Call::new("cuIpcGetMemHandle", |t| export(t.given)).with(with_plain).then(free_given),
    Call::new("cuIpcOpenMemHandle(of this process)", |t| {
        let mut handle = IpcHandle([0; 8]);
        let code = cu!(cuIpcGetMemHandle(&mut handle, t.given));
        t.note.store(u64::from(code), Ordering::Release);
        cu!(cuIpcOpenMemHandle_v2(&mut 0, handle, 1))
    })
    .with(with_plain)
    .then(free_given),
    Call::new("cuIpcCloseMemHandle(not open)", |t| cu!(cuIpcCloseMemHandle(t.given))).with(with_plain).then(free_given),
    Call::new("cuIpcGetEventHandle", |t| cu!(cuIpcGetEventHandle(&mut IpcHandle([0; 8]), t.given as Handle)))
        .with(|t| with_event(t, 6)),
    Call::new("cuMemCreate", |t| create_allocation(t, SIZE)).then(release_made),
    Call::new("cuMemRelease", |t| spent(t, cu!(cuMemRelease(t.given)))).with(with_allocation).then(release_given),
    Call::new("cuMemAddressReserve", |t| reserve(t, SIZE)).then(|t| {
        if t.made() != 0 {
            ok!(cu cuMemAddressFree(t.made(), SIZE));
        }
        silent()
    }),
    Call::new("cuMemAddressFree", |t| spent(t, cu!(cuMemAddressFree(t.given, SIZE))))
        .with(with_reservation)
        .then(free_given_addresses),
    Call::new("cuMemMap", |t| spent(t, cu!(cuMemMap(t.given, SIZE, 0, t.bytes as u64, 0))))
        .with(with_both)
        .then(end_both),
    Call::new("cuMemSetAccess", |t| cu!(cuMemSetAccess(t.given, SIZE, &Access::read_write(0), 1)))
        .with(with_mapping)
        .then(end_mapping),
    Call::new("cuMemUnmap", |t| spent(t, cu!(cuMemUnmap(t.given, SIZE)))).with(with_mapping).then(end_mapping),
    Call::new("cuMemExportToShareableHandle", |t| export_descriptor(t, 1)).with(with_allocation).then(release_given),
    Call::new("cuMemGetAllocationGranularity", |_| {
        cu!(cuMemGetAllocationGranularity(&mut 0, &Properties::with_handles(1), 0))
    }),
    Call::new("cuMemRetainAllocationHandle", |t| retain(t, t.rig.blocks.dst(Memory::Mapped))).then(release_made),
    Call::new("cublasCreate", |t| {
        let mut handle = 0;
        let code = blas!(cublasCreate_v2(&mut handle));
        t.keep(code, handle as u64)
    })
    .then(|t| {
        if t.made() != 0 {
            need("cublasDestroy", blas!(cublasDestroy_v2(t.made() as Handle)))?;
        }
        silent()
    }),
    Call::new("cublasDestroy", |t| spent(t, blas!(cublasDestroy_v2(t.given as Handle))))
        .with(|t| {
            t.with_blas()?;
            t.given = std::mem::take(&mut t.blas) as u64;
            Ok(())
        })
        .then(|t| {
            if t.made() == 0 {
                need("cublasDestroy", blas!(cublasDestroy_v2(t.given as Handle)))?;
            }
            silent()
        }),
    Call::new("cublasSetWorkspace", |t| blas!(cublasSetWorkspace_v2(t.blas, t.src, SIZE))).with(with_blas),
    Call::new("cublasSetMathMode", |t| blas!(cublasSetMathMode(t.blas, 3))).with(with_blas),
    Call::new("cublasSetAtomicsMode", |t| blas!(cublasSetAtomicsMode(t.blas, 1))).with(with_blas),
    Call::new("cublasSetPointerMode", |t| blas!(cublasSetPointerMode_v2(t.blas, 1))).with(with_blas),
    Call::new("cublasGetStream", |t| {
        let mut stream = 0;
        let code = blas!(cublasGetStream_v2(t.blas, &mut stream));
        t.tell(code, u64::from(stream == t.stream))
    })
    .with(with_blas),
    Call::new("cublasLtCreate", |t| {
        let mut handle = 0;
        let code = lt!(cublasLtCreate(&mut handle));
        t.keep(code, handle as u64)
    })
    .then(|t| {
        if t.made() != 0 {
            need("cublasLtDestroy", lt!(cublasLtDestroy(t.made() as Handle)))?;
        }
        silent()
    }),
    Call::new("cublasLtDestroy", |t| spent(t, lt!(cublasLtDestroy(t.given as Handle))))
        .with(with_lt)
        .then(destroy_given_lt),
    Call::new("cublasLtMatmulAlgoGetHeuristic", |t| {
        let Some((plan, _)) = &t.lt else { return u32::MAX };
        let (code, found, _) = plan.find();
        t.tell(code, found as u64)
    })
    .with(with_plan),
    // Two devices.
    Call::new("cuMemcpyPeerAsync(to the second device)", |t| {
        let other = t.rig.other.unwrap_or(0);
        cu!(cuMemcpyPeerAsync(t.rig.far, other, t.src, t.rig.context, 64, t.stream))
    })
    .far(),
    Call::new("cuMemcpyAsync(to the second device)", |t| cu!(cuMemcpyAsync(t.rig.far, t.src, 64, t.stream))).far(),
    Call::new("cuMemcpyAsync(from the second device)", |t| cu!(cuMemcpyAsync(t.dst, t.rig.far, 64, t.stream))).far(),
    Call::new("cuStreamWaitEvent(of the second device)", |t| cu!(cuStreamWaitEvent(t.stream, t.given as Handle, 0)))
        .with(with_far_event)
        .far(),
    Call::new("cuEventRecord(of the second device)", |t| cu!(cuEventRecord(t.given as Handle, t.stream)))
        .with(with_far_event)
        .far(),
    Call::new("cuEventQuery(of the second device)", |t| cu!(cuEventQuery(t.given as Handle)))
        .with(with_far_event)
        .far(),
    Call::new("cuEventElapsedTime(to the second device)", |t| {
        cu!(cuEventElapsedTime(&mut 0.0, t.done, t.given as Handle))
    })
    .with(with_far_event)
    .far(),
    Call::new("cuMemFree(of the second device)", |t| spent(t, cu!(cuMemFree_v2(t.given))))
        .with(|t| on_second(t, || memory(4096)).map(|address| t.given = address))
        .then(free_given)
        .far(),
    Call::new("cuStreamQuery(of the second device)", |t| cu!(cuStreamQuery(t.given as Handle)))
        .with(with_far_stream)
        .then(destroy_given_stream)
        .far(),
    Call::new("cuStreamSynchronize(of the second device)", |t| cu!(cuStreamSynchronize(t.given as Handle)))
        .with(with_far_stream)
        .then(destroy_given_stream)
        .far(),
    Call::new("cuMemsetD8Async(on a stream of the second device)", |t| {
        cu!(cuMemsetD8Async(t.rig.far, NEW, 64, t.given as Handle))
    })
    .with(with_far_stream)
    .then(|t| {
        ok!(cu cuStreamSynchronize(t.given as Handle));
        destroy_given_stream(t)
    })
    .far(),
    Call::new("cuGraphLaunch(on a stream of the second device)", |t| {
        cu!(cuGraphLaunch(t.executable, t.given as Handle))
    })
    .with(|t| {
        with_graph(t)?;
        with_far_stream(t)
    })
    .then(destroy_given_stream)
    .far(),
    Call::new("cublasSetStream(of the second device)", |t| blas!(cublasSetStream_v2(t.blas, t.given as Handle)))
        .with(|t| {
            t.with_blas()?;
            with_far_stream(t)
        })
        .then(|t| {
            need("cublasSetStream", blas!(cublasSetStream_v2(t.blas, t.stream)))?;
            destroy_given_stream(t)
        })
        .far(),
    Call::new("cuIpcGetMemHandle(of the second device)", |t| export(t.rig.far)).far(),
    Call::new("cuMemGetAddressRange(of the second device)", |t| range(t, t.rig.far)).far(),
    Call::new("cuMemSetAccess(for the second device)", |t| {
        cu!(cuMemSetAccess(t.given, SIZE, &Access::read_write(1), 1))
    })
    .with(with_mapping)
    .then(end_mapping)
    .far(),
];

fn on_second<T>(t: &Things<'_>, make: impl FnOnce() -> Answer<T>) -> Answer<T> {
    let other = t.rig.other.ok_or("there is no second device")?;
    ok!(cu cuCtxSetCurrent(other));
    let made = make();
    ok!(cu cuCtxSetCurrent(t.rig.context));
    made
}

fn with_far_event(t: &mut Things<'_>) -> Answer {
    let made = on_second(t, || event(0))?;
    t.events.push(made);
    t.given = made as u64;
    Ok(())
}

fn with_far_stream(t: &mut Things<'_>) -> Answer {
    t.given = on_second(t, stream)? as u64;
    Ok(())
}

// Arguments that a call refuses, or takes without doing anything.

pub(crate) const ARGUMENT_CALLS: &[Call] = &[
    Call::new("cuInit(flags 1)", |_| cu!(cuInit(1))),
    Call::new("cuDeviceGet(device 99)", |_| cu!(cuDeviceGet(&mut 0, 99))),
    Call::new("cuDeviceGet(device -1)", |_| cu!(cuDeviceGet(&mut 0, -1))),
    Call::new("cuDeviceGetAttribute(unknown)", |_| cu!(cuDeviceGetAttribute(&mut 0, 9999, 0))),
    Call::new("cuDeviceGetAttribute(device 99)", |_| cu!(cuDeviceGetAttribute(&mut 0, 1, 99))),
    Call::new("cuDeviceTotalMem(device 99)", |_| cu!(cuDeviceTotalMem_v2(&mut 0, 99))),
    Call::new("cuDeviceCanAccessPeer(device 99)", |_| cu!(cuDeviceCanAccessPeer(&mut 0, 0, 99))),
    Call::new("cuDevicePrimaryCtxRetain(device 99)", |_| cu!(cuDevicePrimaryCtxRetain(&mut 0, 99))),
    Call::new("cuCtxEnablePeerAccess(flags 1)", |t| cu!(cuCtxEnablePeerAccess(t.rig.context, 1))),
    Call::new("cuStreamCreate(unknown flag)", |t| create_stream(t, 9)).then(destroy_made_stream),
    Call::new("cuStreamCreate(no place)", |_| cu!(cuStreamCreate(null_mut(), 1))),
    Call::new("cuStreamDestroy(null)", |_| cu!(cuStreamDestroy_v2(0))),
    Call::new("cuStreamDestroy(per-thread)", |_| cu!(cuStreamDestroy_v2(2))),
    Call::new("cuStreamWaitEvent(null)", |t| cu!(cuStreamWaitEvent(t.stream, 0, 0))),
    Call::new("cuStreamBeginCapture(mode 3)", |t| begin(t, 3)),
    Call::new("cuStreamEndCapture(no place)", |t| cu!(cuStreamEndCapture(t.stream, null_mut()))),
    Call::new("cuStreamIsCapturing(no place)", |t| cu!(cuStreamIsCapturing(t.stream, null_mut()))),
    Call::new("cuEventCreate(unknown flag)", |t| create_event(t, 64)).then(destroy_made_event),
    Call::new("cuEventCreate(for other processes, with times)", |t| create_event(t, 4)).then(destroy_made_event),
    Call::new("cuEventCreate(no place)", |_| cu!(cuEventCreate(null_mut(), 0))),
    Call::new("cuEventDestroy(null)", |_| cu!(cuEventDestroy_v2(0))),
    Call::new("cuEventQuery(null)", |_| cu!(cuEventQuery(0))),
    Call::new("cuEventSynchronize(null)", |_| cu!(cuEventSynchronize(0))),
    Call::new("cuEventRecord(null)", |t| cu!(cuEventRecord(0, t.stream))),
    Call::new("cuEventElapsedTime(null)", |t| cu!(cuEventElapsedTime(&mut 0.0, 0, t.done))),
    Call::new("cuGraphInstantiate(null)", |_| cu!(cuGraphInstantiateWithFlags(&mut 0, 0, 0))),
    Call::new("cuGraphLaunch(null)", |t| cu!(cuGraphLaunch(0, t.stream))),
    Call::new("cuGraphDestroy(null)", |_| cu!(cuGraphDestroy(0))),
    Call::new("cuGraphExecDestroy(null)", |_| cu!(cuGraphExecDestroy(0))),
    Call::new("cuLaunchHostFunc(null)", |t| cu!(cuLaunchHostFunc(t.stream, None, null_mut()))),
    Call::new("cuMemAlloc(0 bytes)", |t| allocate(t, 0)).then(free_made),
    Call::new("cuMemAlloc(1 PiB)", |t| allocate(t, 1 << 50)).then(free_made),
    Call::new("cuMemAlloc(no place)", |_| cu!(cuMemAlloc_v2(null_mut(), 4096))),
    Call::new("cuMemFree(null)", |_| cu!(cuMemFree_v2(0))),
    Call::new("cuMemFree(inside)", |t| spent(t, cu!(cuMemFree_v2(t.given + 256)))).with(with_plain).then(free_given),
    Call::new("cuMemFree(mapped)", |t| cu!(cuMemFree_v2(t.rig.blocks.dst(Memory::Mapped)))),
    Call::new("cuMemFree(pinned)", |t| cu!(cuMemFree_v2(t.rig.blocks.dst(Memory::Pinned)))),
    Call::new("cuMemFree(registered)", |t| cu!(cuMemFree_v2(t.rig.blocks.dst(Memory::Registered)))),
    Call::new("cuMemFree(pageable)", |t| cu!(cuMemFree_v2(t.rig.blocks.dst(Memory::Pageable)))),
    Call::new("cuMemAllocAsync(1 PiB)", |t| cu!(cuMemAllocAsync(&mut 0, 1 << 50, t.stream))),
    Call::new("cuMemFreeAsync(inside)", |t| spent(t, cu!(cuMemFreeAsync(t.given + 256, t.stream))))
        .with(with_pool_block)
        .then(free_given),
    Call::new("cuMemFreeAsync(mapped)", |t| cu!(cuMemFreeAsync(t.rig.blocks.dst(Memory::Mapped), t.stream))),
    Call::new("cuMemFreeAsync(pinned)", |t| cu!(cuMemFreeAsync(t.rig.blocks.dst(Memory::Pinned), t.stream))),
    Call::new("cuMemGetAddressRange(inside)", |t| range(t, t.rig.blocks.dst(Memory::Plain) + 4096)),
    Call::new("cuMemGetAddressRange(inside mapped)", |t| range(t, t.rig.blocks.dst(Memory::Mapped) + 4096)),
    Call::new("cuMemGetAddressRange(pool)", |t| range(t, t.rig.blocks.dst(Memory::Pool))),
    Call::new("cuMemGetAddressRange(pinned)", |t| range(t, t.rig.blocks.dst(Memory::Pinned))),
    Call::new("cuMemGetAddressRange(registered)", |t| range(t, t.rig.blocks.dst(Memory::Registered))),
    Call::new("cuMemGetAddressRange(pageable)", |t| range(t, t.rig.blocks.dst(Memory::Pageable))),
    Call::new("cuMemGetAddressRange(null)", |t| range(t, 0)),
    Call::new("cuMemPoolGetAttribute(unknown)", |t| {
        cu!(cuMemPoolGetAttribute(t.given as Handle, 99, std::ptr::from_mut(&mut 0u64).cast()))
    })
    .with(with_pool),
    Call::new("cuMemHostAlloc(0 bytes)", |t| host_allocate(t, 0, 0)).then(free_made_host),
    Call::new("cuMemHostAlloc(unknown flag)", |t| host_allocate(t, 4096, 0x1000)).then(free_made_host),
    Call::new("cuMemFreeHost(null)", |_| cu!(cuMemFreeHost(null_mut()))),
    Call::new("cuMemFreeHost(inside)", |t| spent(t, cu!(cuMemFreeHost(host(t.given + 64)))))
        .with(with_pinned)
        .then(free_given_host),
    Call::new("cuMemFreeHost(registered)", |t| cu!(cuMemFreeHost(host(t.rig.blocks.dst(Memory::Registered))))),
    Call::new("cuMemFreeHost(pageable)", |t| cu!(cuMemFreeHost(host(t.rig.blocks.dst(Memory::Pageable))))),
    Call::new("cuMemFreeHost(plain)", |t| cu!(cuMemFreeHost(host(t.rig.blocks.dst(Memory::Plain))))),
    Call::new("cuMemHostRegister(0 bytes)", |t| cu!(cuMemHostRegister_v2(host(t.given), 0, 1)))
        .with(with_pages)
        .then(unmap_pages),
    Call::new("cuMemHostRegister(no page)", |t| cu!(cuMemHostRegister_v2(host(t.given + 100), 5000, 1)))
        .with(with_pages)
        .then(|t| {
            cu!(cuMemHostUnregister(host(t.given + 100)));
            unmap_pages(t)
        }),
    Call::new("cuMemHostRegister(again)", |t| cu!(cuMemHostRegister_v2(host(t.given), 8192, 1)))
        .with(with_registered)
        .then(unmap_pages),
    Call::new("cuMemHostRegister(pinned)", |t| {
        cu!(cuMemHostRegister_v2(host(t.rig.blocks.dst(Memory::Pinned)), 4096, 1))
    }),
    Call::new("cuMemHostRegister(null)", |_| cu!(cuMemHostRegister_v2(null_mut(), 4096, 1))),
    Call::new("cuMemHostRegister(unknown flag)", |t| cu!(cuMemHostRegister_v2(host(t.given), 8192, 0x1000)))
        .with(with_pages)
        .then(unmap_pages),
    Call::new("cuMemHostUnregister(inside)", |t| cu!(cuMemHostUnregister(host(t.given + 4096))))
        .with(with_registered)
        .then(unmap_pages),
    Call::new("cuMemHostUnregister(pinned)", |t| cu!(cuMemHostUnregister(host(t.rig.blocks.dst(Memory::Pinned))))),
    Call::new("cuMemHostUnregister(pageable)", |t| cu!(cuMemHostUnregister(host(t.rig.blocks.dst(Memory::Pageable))))),
    Call::new("cuMemHostUnregister(null)", |_| cu!(cuMemHostUnregister(null_mut()))),
    Call::new("cuMemHostGetDevicePointer(inside)", |t| {
        cu!(cuMemHostGetDevicePointer_v2(&mut 0, host(t.rig.blocks.dst(Memory::Pinned) + 100), 0))
    }),
    Call::new("cuMemHostGetDevicePointer(registered)", |t| {
        cu!(cuMemHostGetDevicePointer_v2(&mut 0, host(t.rig.blocks.dst(Memory::Registered)), 0))
    }),
    Call::new("cuMemHostGetDevicePointer(flags 1)", |t| {
        cu!(cuMemHostGetDevicePointer_v2(&mut 0, host(t.rig.blocks.dst(Memory::Pinned)), 1))
    }),
    Call::new("cuPointerGetAttribute(type, pool)", |t| attribute(t, Memory::Pool, 2)),
    Call::new("cuPointerGetAttribute(type, mapped)", |t| attribute(t, Memory::Mapped, 2)),
    Call::new("cuPointerGetAttribute(type, pinned)", |t| attribute(t, Memory::Pinned, 2)),
    Call::new("cuPointerGetAttribute(type, registered)", |t| attribute(t, Memory::Registered, 2)),
    Call::new("cuPointerGetAttribute(device, plain)", |t| attribute(t, Memory::Plain, 9)),
    Call::new("cuPointerGetAttribute(device, pool)", |t| attribute(t, Memory::Pool, 9)),
    Call::new("cuPointerGetAttribute(device, mapped)", |t| attribute(t, Memory::Mapped, 9)),
    Call::new("cuPointerGetAttribute(device, registered)", |t| attribute(t, Memory::Registered, 9)),
    Call::new("cuPointerGetAttribute(context, pool)", |t| attribute(t, Memory::Pool, 1)),
    Call::new("cuPointerGetAttribute(context, mapped)", |t| attribute(t, Memory::Mapped, 1)),
    Call::new("cuPointerGetAttribute(context, pinned)", |t| attribute(t, Memory::Pinned, 1)),
    Call::new("cuPointerGetAttribute(managed, plain)", |t| attribute(t, Memory::Plain, IS_MANAGED)),
    Call::new("cuPointerGetAttribute(managed, pool)", |t| attribute(t, Memory::Pool, IS_MANAGED)),
    Call::new("cuPointerGetAttribute(managed, mapped)", |t| attribute(t, Memory::Mapped, IS_MANAGED)),
    Call::new("cuPointerGetAttribute(managed, pinned)", |t| attribute(t, Memory::Pinned, IS_MANAGED)),
    Call::new("cuPointerGetAttribute(managed, registered)", |t| attribute(t, Memory::Registered, IS_MANAGED)),
    Call::new("cuPointerGetAttribute(legacy, plain)", |t| attribute(t, Memory::Plain, IS_LEGACY)),
    Call::new("cuPointerGetAttribute(legacy, pool)", |t| attribute(t, Memory::Pool, IS_LEGACY)),
    Call::new("cuPointerGetAttribute(legacy, mapped)", |t| attribute(t, Memory::Mapped, IS_LEGACY)),
    Call::new("cuPointerGetAttribute(legacy, pinned)", |t| attribute(t, Memory::Pinned, IS_LEGACY)),
    Call::new("cuPointerGetAttribute(legacy, registered)", |t| attribute(t, Memory::Registered, IS_LEGACY)),
    Call::new("cuPointerGetAttribute(handle kinds, plain)", |t| attribute(t, Memory::Plain, HANDLE_KINDS)),
    Call::new("cuPointerGetAttribute(handle kinds, pool)", |t| attribute(t, Memory::Pool, HANDLE_KINDS)),
    Call::new("cuPointerGetAttribute(handle kinds, mapped)", |t| attribute(t, Memory::Mapped, HANDLE_KINDS)),
    Call::new("cuPointerGetAttribute(handle kinds, pinned)", |t| attribute(t, Memory::Pinned, HANDLE_KINDS)),
    Call::new("cuPointerGetAttribute(handle kinds, registered)", |t| attribute(t, Memory::Registered, HANDLE_KINDS)),
    Call::new("cuPointerGetAttribute(pool, plain)", |t| attribute(t, Memory::Plain, POOL)),
    Call::new("cuPointerGetAttribute(pool, pool)", |t| attribute(t, Memory::Pool, POOL)),
    Call::new("cuPointerGetAttribute(pool, mapped)", |t| attribute(t, Memory::Mapped, POOL)),
    Call::new("cuPointerGetAttribute(pool, pinned)", |t| attribute(t, Memory::Pinned, POOL)),
    Call::new("cuPointerGetAttribute(pool, registered)", |t| attribute(t, Memory::Registered, POOL)),
    Call::new("cuPointerGetAttribute(type, pageable)", |t| attribute(t, Memory::Pageable, TYPE)),
    Call::new("cuPointerGetAttribute(unknown)", |t| attribute(t, Memory::Plain, 99)),
    Call::new("cuPointerGetAttribute(no place)", |t| {
        cu!(cuPointerGetAttribute(null_mut(), 2, t.rig.blocks.dst(Memory::Plain)))
    }),
    Call::new("cuIpcGetMemHandle(pool)", |t| export(t.rig.blocks.dst(Memory::Pool))),
    Call::new("cuIpcGetMemHandle(mapped)", |t| export(t.rig.blocks.dst(Memory::Mapped))),
    Call::new("cuIpcGetMemHandle(pinned)", |t| export(t.rig.blocks.dst(Memory::Pinned))),
    Call::new("cuIpcGetMemHandle(registered)", |t| export(t.rig.blocks.dst(Memory::Registered))),
    Call::new("cuIpcGetMemHandle(null)", |_| export(0)),
    Call::new("cuIpcGetEventHandle(of this process only)", |t| {
        cu!(cuIpcGetEventHandle(&mut IpcHandle([0; 8]), t.event))
    }),
    Call::new("cuMemCreate(0 bytes)", |t| create_allocation(t, 0)).then(release_made),
    Call::new("cuMemCreate(4096 bytes)", |t| create_allocation(t, 4096)).then(release_made),
    Call::new("cuMemAddressReserve(0 bytes)", |t| reserve(t, 0)),
    Call::new("cuMemAddressReserve(4096 bytes)", |t| reserve(t, 4096)),
    Call::new("cuMemMap(offset 4096)", |t| spent(t, cu!(cuMemMap(t.given, SIZE, 4096, t.bytes as u64, 0))))
        .with(with_both)
        .then(end_both),
    Call::new("cuMemMap(half)", |t| spent(t, cu!(cuMemMap(t.given, SIZE / 2, 0, t.bytes as u64, 0))))
        .with(with_both)
        .then(end_both),
    Call::new("cuMemSetAccess(not mapped)", |t| cu!(cuMemSetAccess(t.given, SIZE, &Access::read_write(0), 1)))
        .with(with_reservation)
        .then(free_given_addresses),
    Call::new("cuMemSetAccess(half)", |t| cu!(cuMemSetAccess(t.given, SIZE / 2, &Access::read_write(0), 1)))
        .with(with_mapping)
        .then(end_mapping),
    Call::new("cuMemUnmap(not mapped)", |t| cu!(cuMemUnmap(t.given, SIZE)))
        .with(with_reservation)
        .then(free_given_addresses),
    Call::new("cuMemUnmap(half)", |t| cu!(cuMemUnmap(t.given, SIZE / 2))).with(with_mapping).then(end_mapping),
    Call::new("cuMemExportToShareableHandle(unknown kind)", |t| export_descriptor(t, 0x100))
        .with(with_allocation)
        .then(release_given),
    Call::new("cuMemRetainAllocationHandle(plain)", |t| retain(t, t.rig.blocks.dst(Memory::Plain))).then(release_made),
    Call::new("cuMemRetainAllocationHandle(inside)", |t| retain(t, t.rig.blocks.dst(Memory::Mapped) + 4096))
        .then(release_made),
    Call::new("cuMemRetainAllocationHandle(pool)", |t| retain(t, t.rig.blocks.dst(Memory::Pool))).then(release_made),
    Call::new("cuMemRetainAllocationHandle(pinned)", |t| retain(t, t.rig.blocks.dst(Memory::Pinned)))
        .then(release_made),
    Call::new("cuMemRetainAllocationHandle(pageable)", |t| retain(t, t.rig.blocks.dst(Memory::Pageable)))
        .then(release_made),
    Call::new("cuMemRetainAllocationHandle(null)", |t| retain(t, 0)).then(release_made),
    Call::new("cuMemExportToShareableHandle(retained)", |t| export_descriptor(t, 1))
        .with(|t| {
            ok!(cu cuMemRetainAllocationHandle(&mut t.given, t.rig.blocks.dst(Memory::Mapped)));
            Ok(())
        })
        .then(release_given),
    Call::new("cuMemImportFromShareableHandle(of this process)", |t| {
        let mut descriptor = -1i32;
        let exported = cu!(cuMemExportToShareableHandle(std::ptr::from_mut(&mut descriptor).cast(), t.given, 1, 0));
        if exported != 0 {
            return exported;
        }
        let mut handle = 0;
        let code = cu!(cuMemImportFromShareableHandle(&mut handle, descriptor as usize, 1));
        // SAFETY: the driver has just made this descriptor, and an import does not take it.
        unsafe { libc::close(descriptor) };
        t.keep(code, handle)
    })
    .with(with_allocation)
    .then(|t| {
        ok!(cu cuMemRelease(t.given));
        release_made(t)
    }),
    Call::new("cuMemImportFromShareableHandle(no descriptor)", |t| {
        let mut handle = 0;
        let code = cu!(cuMemImportFromShareableHandle(&mut handle, usize::MAX, 1));
        t.keep(code, handle)
    })
    .then(release_made),
    Call::new("cublasCreate(no place)", |_| blas!(cublasCreate_v2(null_mut()))),
    Call::new("cublasDestroy(null)", |_| blas!(cublasDestroy_v2(0))),
    Call::new("cublasSetStream(null handle)", |t| blas!(cublasSetStream_v2(0, t.stream))),
    Call::new("cublasSetWorkspace(null handle)", |_| blas!(cublasSetWorkspace_v2(0, 0, 0))),
    Call::new("cublasSetWorkspace(no bytes)", |t| blas!(cublasSetWorkspace_v2(t.blas, 0, 0))).with(with_blas),
    Call::new("cublasSetWorkspace(unaligned)", |t| blas!(cublasSetWorkspace_v2(t.blas, t.src + 64, 1 << 20)))
        .with(with_blas),
    Call::new("cublasSetMathMode(unknown)", |t| blas!(cublasSetMathMode(t.blas, 77))).with(with_blas),
    Call::new("cublasSetAtomicsMode(unknown)", |t| blas!(cublasSetAtomicsMode(t.blas, 7))).with(with_blas),
    Call::new("cublasSetPointerMode(unknown)", |t| blas!(cublasSetPointerMode_v2(t.blas, 7))).with(with_blas),
    product_of("cublasSgemm(m = 0)", |t| product(t, [0, 16, 16], [16; 3])),
    product_of("cublasSgemm(k = 0)", |t| product(t, [16, 16, 0], [16; 3])),
    product_of("cublasSgemm(m = -1)", |t| product(t, [-1, 16, 16], [16; 3])),
    product_of("cublasSgemm(lda < m)", |t| product(t, [16; 3], [15, 16, 16])),
    product_of("cublasSgemm(ldb < k)", |t| product(t, [16; 3], [16, 15, 16])),
    product_of("cublasSgemm(ldc < m)", |t| product(t, [16; 3], [16, 16, 15])),
    product_of("cublasSgemm(no alpha)", |t| {
        let zero = 0f32;
        let [a, b, c] = matrices(t);
        blas!(cublasSgemm_v2(t.blas, 0, 0, 16, 16, 16, null(), a, 16, b, 16, bits(&zero), c, 16))
    }),
];

/// A product that may be refused. It runs in no capture, so it is not launched.
const fn product_of(name: &'static str, call: fn(&Things<'_>) -> u32) -> Call {
    Call::new(name, call).with(with_product).then(seen_values)
}

fn product(t: &Things<'_>, [m, n, k]: [i32; 3], [lda, ldb, ldc]: [i32; 3]) -> u32 {
    let (one, zero) = (1f32, 0f32);
    let [a, b, c] = matrices(t);
    blas!(cublasSgemm_v2(t.blas, 0, 0, m, n, k, bits(&one), a, lda, b, ldb, bits(&zero), c, ldc))
}
