//! The life of a process: before initialisation, threads and their contexts, forks, exit, and a lost context.

use std::cell::RefCell;
use std::process::Command;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::calls::ok;
use crate::calls::{Handle, blas, cu};
use crate::rig::{event, memory, on_another_thread, own_program, start, store, stream, upload};
use highwater_simulated_harness::Answer;
use highwater_simulated_harness::log::{Log, need};
use highwater_simulated_harness::rules;

rules! {
    "init.codes-before-it" Driver Own before: "before cuInit every call but cuDriverGetVersion answers 3, and bad flags answer 1";
    "init.again" Driver Own twice: "cuInit may be called again";
    "context.thread-without-one" Driver Shared without_context: "on a thread without a context allocations answer 201 and a free succeeds";
    "context.stack" Driver Own stack: "contexts are pushed and popped for each thread, and retaining one gives the same each time";
    "context.released" Driver Own released: "the last release of a primary context ends it, and one more answers 201";
    "context.gemm-without-one" Blas Shared gemm_without_context: "a product on a thread without a context makes the primary one current";
    "context.made-by-cublas" Blas Own made_by_cublas: "cublasCreate starts the driver and makes the first device's context current";
    "codes.names" Driver Shared names: "codes have the vendor's names, and an unknown code answers 1";
    "fork.after-init" Driver Own fork_after: "in a child forked after cuInit every call answers 3, and the parent goes on";
    "fork.cublas" Blas Own fork_cublas: "cublasCreate answers 1 in a child forked after cuInit";
    "fork.before-init" Driver Own fork_before: "a child forked before cuInit can initialise the driver itself";
    "exit.codes" Blas Own exit: "the driver lives in thread locals and handlers registered after cuInit, and answers 4 in those registered before";
    "context.lost" Blas Own lost: "a product that touches memory of nobody answers 13, or 0 where the fault is met later; it loses the context, and all that follows answers 700";
}

fn before(log: &mut Log) -> Answer {
    let (mut number, mut handle, mut address) = (0, 0, 0);
    log.is("cuDriverGetVersion", cu!(cuDriverGetVersion(&mut number)), 0);
    log.is("the version is of CUDA 12 or later", number >= 12000, true);
    log.is("cuDeviceGetCount", cu!(cuDeviceGetCount(&mut number)), 3);
    log.is("cuCtxGetCurrent", cu!(cuCtxGetCurrent(&mut handle)), 3);
    log.is("cuDevicePrimaryCtxRetain", cu!(cuDevicePrimaryCtxRetain(&mut handle, 0)), 3);
    log.is("cuMemAlloc", cu!(cuMemAlloc_v2(&mut address, 64)), 3);
    log.is("cuStreamCreate", cu!(cuStreamCreate(&mut handle, 1)), 3);
    log.is("cuInit with flags", cu!(cuInit(1)), 1);
    log.is("cuDeviceGetCount after that", cu!(cuDeviceGetCount(&mut number)), 3);
    log.is("cuInit", cu!(cuInit(0)), 0);
    log.is("cuDeviceGetCount after cuInit", cu!(cuDeviceGetCount(&mut number)), 0);
    Ok(())
}

fn twice(log: &mut Log) -> Answer {
    log.is("first", cu!(cuInit(0)), 0);
    log.is("second", cu!(cuInit(0)), 0);
    let mut device = -1;
    log.is("device 0", (cu!(cuDeviceGet(&mut device, 0)), device), (0, 0));
    log.is("device -1", cu!(cuDeviceGet(&mut device, -1)), 101);
    log.is("device 1000", cu!(cuDeviceGet(&mut device, 1000)), 101);
    let mut handle = 0;
    log.is("cuMemAlloc without a context", cu!(cuMemAlloc_v2(&mut 0, 64)), 201);
    log.is("the context", (cu!(cuCtxGetCurrent(&mut handle)), handle), (0, 0));
    Ok(())
}

fn without_context(log: &mut Log) -> Answer {
    let live = memory(4096)?;
    let seen = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let (mut address, mut host, mut handle) = (0, std::ptr::null_mut(), 1);
            let current = (cu!(cuCtxGetCurrent(&mut handle)), handle);
            let codes = [
                ("cuMemAlloc", cu!(cuMemAlloc_v2(&mut address, 4096)), 201),
                ("cuMemHostAlloc", cu!(cuMemHostAlloc(&mut host, 4096, 0)), 201),
                ("cuEventCreate", cu!(cuEventCreate(&mut handle, 0)), 201),
                ("cuStreamCreate", cu!(cuStreamCreate(&mut handle, 1)), 201),
                ("cuCtxGetDevice", cu!(cuCtxGetDevice(&mut 0)), 201),
                ("cuCtxSynchronize", cu!(cuCtxSynchronize()), 201),
                ("cuStreamSynchronize", cu!(cuStreamSynchronize(0)), 201),
                ("cuMemGetInfo", cu!(cuMemGetInfo_v2(&mut 0, &mut 0)), 201),
                ("cuMemGetAddressRange", cu!(cuMemGetAddressRange_v2(&mut 0, &mut 0, live)), 201),
                ("cuMemFree of a live pointer", cu!(cuMemFree_v2(live)), 0),
            ];
            (current, codes)
        });
        thread.join().map_err(|_| "the thread panicked".to_owned())
    })?;
    log.is("cuCtxGetCurrent", seen.0, (0, 0));
    for (what, code, expected) in seen.1 {
        log.is(what, code, expected);
    }
    Ok(())
}

fn stack(log: &mut Log) -> Answer {
    let context = start(0)?;
    let (mut again, mut current, mut device) = (0, 0, -1);
    ok!(cu cuDevicePrimaryCtxRetain(&mut again, 0));
    log.is("retained again, it is the same", again == context, true);
    ok!(cu cuCtxSetCurrent(0));
    log.is("none is current", (cu!(cuCtxGetCurrent(&mut current)), current), (0, 0));
    log.is("cuCtxGetDevice without one", cu!(cuCtxGetDevice(&mut device)), 201);
    log.is("popped from an empty stack", cu!(cuCtxPopCurrent_v2(&mut current)), 201);
    log.is("pushed", cu!(cuCtxPushCurrent_v2(context)), 0);
    log.is("its device", (cu!(cuCtxGetDevice(&mut device)), device), (0, 0));
    log.is("pushed once more", cu!(cuCtxPushCurrent_v2(context)), 0);
    log.is("popped", (cu!(cuCtxPopCurrent_v2(&mut current)), current == context), (0, true));
    log.is("current below", (cu!(cuCtxGetCurrent(&mut current)), current == context), (0, true));
    let elsewhere = std::thread::scope(|scope| {
        scope
            .spawn(|| {
                let mut current = 1;
                (cu!(cuCtxGetCurrent(&mut current)), current)
            })
            .join()
            .map_err(|_| "the thread panicked".to_owned())
    })?;
    log.is("another thread has none", elsewhere, (0, 0));
    log.is("popped, the last", (cu!(cuCtxPopCurrent_v2(&mut current)), current == context), (0, true));
    log.is("none is left", (cu!(cuCtxGetCurrent(&mut current)), current), (0, 0));
    Ok(())
}

fn released(log: &mut Log) -> Answer {
    ok!(cu cuInit(0));
    let (mut flags, mut active) = (9, 9);
    let state = |flags: &mut u32, active: &mut i32| (cu!(cuDevicePrimaryCtxGetState(0, flags, active)), *active);
    log.is("before", state(&mut flags, &mut active), (0, 0));
    start(0)?;
    let held = memory(4096)?;
    ok!(cu cuDevicePrimaryCtxRetain(&mut 0, 0));
    log.is("retained twice", state(&mut flags, &mut active), (0, 1));
    log.is("released once", (cu!(cuDevicePrimaryCtxRelease_v2(0)), state(&mut flags, &mut active)), (0, (0, 1)));
    log.is("released twice", (cu!(cuDevicePrimaryCtxRelease_v2(0)), state(&mut flags, &mut active)), (0, (0, 0)));
    log.is("released once too often", cu!(cuDevicePrimaryCtxRelease_v2(0)), 201);
    log.is("cuMemAlloc in what was current", cu!(cuMemAlloc_v2(&mut 0, 64)), 709);
    start(0)?;
    log.is("memory that went with it", cu!(cuMemFree_v2(held)), 1);
    log.is("retained anew", (memory(64).is_ok(), state(&mut flags, &mut active)), (true, (0, 1)));
    Ok(())
}

fn gemm_without_context(log: &mut Log) -> Answer {
    let context = start(0)?;
    let stream = stream()?;
    let mut handle = 0;
    need("cublasCreate", blas!(cublasCreate_v2(&mut handle)))?;
    need("cublasSetStream", blas!(cublasSetStream_v2(handle, stream)))?;
    let (a, c) = (upload(&[3f32], stream)?, upload(&[0f32], stream)?);
    let product = || {
        let (one, zero) = (1f32, 0f32);
        let (one, zero) = ((&raw const one).cast(), (&raw const zero).cast());
        blas!(cublasSgemm_v2(handle, 0, 0, 1, 1, 1, one, a, 1, a, 1, zero, c, 1))
    };
    let seen = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let (mut before, mut after, mut address) = (1, 0, 0);
            let asked = (cu!(cuCtxGetCurrent(&mut before)), before);
            let status = product();
            let current = (cu!(cuCtxGetCurrent(&mut after)), after == context);
            let allocated = cu!(cuMemAlloc_v2(&mut address, 64));
            (asked, status, current, allocated, cu!(cuMemFree_v2(address)))
        });
        thread.join().map_err(|_| "the thread panicked".to_owned())
    })?;
    log.is("current before", seen.0, (0, 0));
    log.is("the product", seen.1, 0);
    log.is("the primary context is current after it", seen.2, (0, true));
    log.is("cuMemAlloc there", seen.3, 0);
    log.is("the value", crate::rig::load::<f32>(c, 1, stream)?, vec![9.0]);
    need("cublasDestroy", blas!(cublasDestroy_v2(handle)))
}

fn made_by_cublas(log: &mut Log) -> Answer {
    crate::calls::Lt::open()?;
    let (mut handle, mut current) = (0, 0);
    log.is("cuCtxGetCurrent before", cu!(cuCtxGetCurrent(&mut current)), 3);
    log.is("cublasCreate", blas!(cublasCreate_v2(&mut handle)), 0);
    log.is("cuCtxGetCurrent", (cu!(cuCtxGetCurrent(&mut current)), current != 0), (0, true));
    log.is("cuMemAlloc", cu!(cuMemAlloc_v2(&mut 0, 64)), 0);
    need("cublasDestroy", blas!(cublasDestroy_v2(handle)))
}

fn names(log: &mut Log) -> Answer {
    let driver = crate::calls::Driver::get();
    for (code, name) in [
        (0, "CUDA_SUCCESS"),
        (1, "CUDA_ERROR_INVALID_VALUE"),
        (2, "CUDA_ERROR_OUT_OF_MEMORY"),
        (3, "CUDA_ERROR_NOT_INITIALIZED"),
        (4, "CUDA_ERROR_DEINITIALIZED"),
        (100, "CUDA_ERROR_NO_DEVICE"),
        (101, "CUDA_ERROR_INVALID_DEVICE"),
        (201, "CUDA_ERROR_INVALID_CONTEXT"),
        (400, "CUDA_ERROR_INVALID_HANDLE"),
        (401, "CUDA_ERROR_ILLEGAL_STATE"),
        (600, "CUDA_ERROR_NOT_READY"),
        (700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
        (704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"),
        (709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"),
        (712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"),
        (713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"),
        (800, "CUDA_ERROR_NOT_PERMITTED"),
        (801, "CUDA_ERROR_NOT_SUPPORTED"),
        (900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
        (901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"),
        (902, "CUDA_ERROR_STREAM_CAPTURE_MERGE"),
        (903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"),
        (904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"),
        (905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"),
        (906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"),
        (907, "CUDA_ERROR_CAPTURED_EVENT"),
        (908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"),
    ] {
        log.is(&code.to_string(), driver.name_of(code), Ok(name.to_owned()));
    }
    log.is("987654", driver.name_of(987_654), Err(1));
    Ok(())
}

/// Runs `body` in a forked child, and gives the numbers it returns.
fn forked<const N: usize>(body: impl FnOnce() -> [u32; N]) -> Answer<[u32; N]> {
    let mut ends = [0; 2];
    // SAFETY: the place has room for two descriptors.
    if unsafe { libc::pipe(ends.as_mut_ptr()) } != 0 {
        return Err(std::io::Error::last_os_error().to_string());
    }
    let mut numbers = [u32::MAX; N];
    let size = size_of_val(&numbers);
    // SAFETY: this process has the one thread that forks; the child makes plain calls and leaves without cleaning up.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error().to_string()),
        0 => {
            numbers = body();
            // SAFETY: the numbers live here, and nothing of the child's is left to be done.
            unsafe {
                let written = libc::write(ends[1], numbers.as_ptr().cast(), size);
                libc::_exit(i32::from(written != size as isize));
            }
        }
        child => {
            let mut status = 0;
            // SAFETY: the descriptors are this process's own, the child too, and the places have room.
            let read = unsafe {
                libc::close(ends[1]);
                let read = libc::read(ends[0], numbers.as_mut_ptr().cast(), size);
                libc::close(ends[0]);
                libc::waitpid(child, &mut status, 0);
                read
            };
            if read == size as isize && status == 0 {
                Ok(numbers)
            } else {
                Err(format!("the forked child ended with {status} after {read} bytes"))
            }
        }
    }
}

fn fork_after(log: &mut Log) -> Answer {
    let context = start(0)?;
    let (live, stream) = (memory(4096)?, stream()?);
    let seen = forked(|| {
        let (mut current, mut address) = (0, 0);
        [
            cu!(cuInit(0)),
            cu!(cuDeviceGetCount(&mut 0)),
            cu!(cuCtxGetCurrent(&mut current)),
            current as u32,
            cu!(cuCtxSetCurrent(context)),
            cu!(cuMemAlloc_v2(&mut address, 64)),
            cu!(cuMemFree_v2(live)),
        ]
    })?;
    let what = [
        ("cuInit", 3),
        ("cuDeviceGetCount", 3),
        ("cuCtxGetCurrent", 3),
        ("the current context", 0),
        ("cuCtxSetCurrent", 3),
        ("cuMemAlloc", 3),
        ("cuMemFree of the parent's", 3),
    ];
    for ((what, expected), seen) in what.into_iter().zip(seen) {
        log.is(&format!("in the child: {what}"), seen, expected);
    }
    log.is("the parent stores", store(live, &[1u8; 64], stream), Ok(()));
    log.is("the parent frees", cu!(cuMemFree_v2(live)), 0);
    log.is("the parent allocates", memory(4096).is_ok(), true);
    Ok(())
}

fn fork_cublas(log: &mut Log) -> Answer {
    crate::calls::Lt::open()?;
    crate::calls::Blas::open()?;
    start(0)?;
    log.is("in the child: cublasCreate", forked(|| [blas!(cublasCreate_v2(&mut 0))])?, [1]);
    Ok(())
}

fn fork_before(log: &mut Log) -> Answer {
    crate::calls::Driver::open()?;
    let seen = forked(|| {
        let mut context = 0;
        [cu!(cuInit(0)), cu!(cuDevicePrimaryCtxRetain(&mut context, 0)), u32::from(context != 0)]
    })?;
    log.is("in the child: cuInit, cuDevicePrimaryCtxRetain, there is a context", seen, [0, 0, 1]);
    log.is("the parent starts", start(0).is_ok(), true);
    Ok(())
}

const ENDING: &str = "HIGHWATER_RULES_ENDING";

/// Returns a command that runs this program again for a part that ends its process.
pub(crate) fn program_that_ends(part: &str) -> Answer<Command> {
    let mut program = own_program()?;
    program.env(ENDING, part);
    Ok(program)
}

/// What a process that shows an end was started for.
pub(crate) fn ending_part() -> Option<String> {
    std::env::var(ENDING).ok()
}

static CONTEXT: AtomicUsize = AtomicUsize::new(0);
static EVENT: AtomicUsize = AtomicUsize::new(0);
static BLAS: AtomicUsize = AtomicUsize::new(0);
static LIVE: AtomicU64 = AtomicU64::new(0);

/// Makes a few calls and writes their codes in one line, by system calls only.
fn say_codes(stage: &str) {
    let (mut current, mut free, mut total, mut address) = (0, 0, 0, 0);
    let codes = [
        cu!(cuCtxGetCurrent(&mut current)),
        cu!(cuCtxSetCurrent(CONTEXT.load(Ordering::SeqCst))),
        cu!(cuEventQuery(EVENT.load(Ordering::SeqCst))),
        cu!(cuMemGetInfo_v2(&mut free, &mut total)),
        cu!(cuMemAlloc_v2(&mut address, 4096)),
    ];
    say(&format!("{stage}: {codes:?}\n"));
}

fn say(text: &str) {
    // SAFETY: the text lives here; nothing can be done about one that cannot be written.
    unsafe { libc::write(1, text.as_ptr().cast(), text.len()) };
}

extern "C" fn registered_before() {
    say_codes("before");
    let freed = cu!(cuMemFree_v2(LIVE.load(Ordering::SeqCst)));
    let destroyed = cu!(cuEventDestroy_v2(EVENT.load(Ordering::SeqCst)));
    let blas = blas!(cublasDestroy_v2(BLAS.load(Ordering::SeqCst)));
    let released = cu!(cuDevicePrimaryCtxRelease_v2(0));
    say(&format!("ended: {:?}\n", [freed, destroyed, blas, released]));
}

extern "C" fn registered_after() {
    say_codes("after");
}

struct AtThreadEnd;

impl Drop for AtThreadEnd {
    fn drop(&mut self) {
        say_codes("thread");
    }
}

thread_local! {
    static AT_THREAD_END: RefCell<Option<AtThreadEnd>> = const { RefCell::new(None) };
}

/// Runs in the process whose end a rule observes.
pub(crate) fn end(part: &str) -> Answer {
    crate::calls::Lt::open()?;
    crate::calls::Blas::open()?;
    crate::calls::Driver::open()?;
    if part == crate::devices::INTERPROCESS {
        return crate::devices::wait_for_interprocess_event();
    }
    // SAFETY: the handlers make calls that live as long as the process.
    unsafe { libc::atexit(registered_before) };
    CONTEXT.store(start(0)?, Ordering::SeqCst);
    EVENT.store(event(2)?, Ordering::SeqCst);
    LIVE.store(memory(4096)?, Ordering::SeqCst);
    let mut handle = 0;
    need("cublasCreate", blas!(cublasCreate_v2(&mut handle)))?;
    BLAS.store(handle, Ordering::SeqCst);
    // SAFETY: as above.
    unsafe { libc::atexit(registered_after) };
    AT_THREAD_END.with(|place| place.replace(Some(AtThreadEnd)));
    Ok(())
}

fn exit(log: &mut Log) -> Answer {
    let output = program_that_ends("exit")?.output().map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout);
    let told = |stage: &str| {
        let lines = text.lines().filter_map(|line| line.split_once(": "));
        lines.filter(|(name, _)| *name == stage).map(|(_, codes)| codes.to_owned()).next().unwrap_or_default()
    };
    for (stage, what, expected) in [
        ("thread", "thread local of the main thread: get, set, query, info, alloc", "[0, 0, 0, 0, 0]"),
        ("after", "handler registered after cuInit: get, set, query, info, alloc", "[0, 0, 0, 0, 0]"),
        ("before", "handler registered before cuInit: get, set, query, info, alloc", "[4, 4, 4, 4, 4]"),
        ("ended", "there: cuMemFree, cuEventDestroy, cublasDestroy, cuDevicePrimaryCtxRelease", "[4, 4, 0, 4]"),
    ] {
        log.is(what, told(stage), expected.to_owned());
    }
    log.is("the process ends well", output.status.code(), Some(0));
    Ok(())
}

fn lost(log: &mut Log) -> Answer {
    let context = start(0)?;
    let stream = stream()?;
    let mut handle: Handle = 0;
    need("cublasCreate", blas!(cublasCreate_v2(&mut handle)))?;
    need("cublasSetStream", blas!(cublasSetStream_v2(handle, stream)))?;
    let (live, done) = (upload(&[1f32; 1024], stream)?, event(2)?);
    // Reserved addresses that nothing is mapped at.
    let (mut nowhere, room) = (0, 4 << 20);
    ok!(cu cuMemAddressReserve(&mut nowhere, room, 0, 0, 0));
    let (one, zero) = (1f32, 0f32);
    let (one, zero) = ((&raw const one).cast(), (&raw const zero).cast());
    let status = blas!(cublasSgemm_v2(handle, 0, 0, 32, 32, 32, one, nowhere, 32, live, 32, zero, live, 32));
    // 13 was seen of the first product of a process. A kernel faults while the call goes on or after it, so 0 is right as
    // well: the calls that follow tell.
    log.either("the product", status, 13, 0);
    log.is("cuStreamSynchronize", cu!(cuStreamSynchronize(stream)), 700);
    log.is("again", cu!(cuStreamSynchronize(stream)), 700);
    log.is("cuMemAlloc", cu!(cuMemAlloc_v2(&mut 0, 64)), 700);
    log.is("cuStreamCreate", cu!(cuStreamCreate(&mut 0, 1)), 700);
    log.is("cuEventRecord", cu!(cuEventRecord(done, stream)), 700);
    log.is("cuCtxSynchronize", cu!(cuCtxSynchronize()), 700);
    log.is("cuMemsetD8Async", cu!(cuMemsetD8Async(live, 0, 64, stream)), 700);
    log.is("on another thread", on_another_thread(context, || cu!(cuMemAlloc_v2(&mut 0, 64)))?, 700);
    log.is("cuDeviceGetCount", cu!(cuDeviceGetCount(&mut 0)), 0);
    log.is("cuMemFree", cu!(cuMemFree_v2(live)), 700);
    log.is("cublasDestroy", blas!(cublasDestroy_v2(handle)), 0);
    Ok(())
}
