//! What the rules are made of: contexts, streams, memory, gates, and other processes.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use highwater_simulated_harness::Answer;

use crate::calls::ok;
use crate::calls::{Handle, IpcHandle, Pointer, cu};

pub(crate) const NOT_READY: u32 = 600;
const PEER: &str = "HIGHWATER_RULES_PEER";
const LINE: &str = "HIGHWATER_RULES_LINE";
/// How long a rule waits for what has to happen.
const PATIENCE: Duration = Duration::from_secs(20);

/// Initialises the driver and makes a device's primary context current on this thread.
pub(crate) fn start(device: i32) -> Answer<Handle> {
    let mut context = 0;
    ok!(cu cuInit(0));
    ok!(cu cuDevicePrimaryCtxRetain(&mut context, device));
    ok!(cu cuCtxSetCurrent(context));
    Ok(context)
}

/// A stream that does not wait for the legacy one.
pub(crate) fn stream() -> Answer<Handle> {
    let mut stream = 0;
    ok!(cu cuStreamCreate(&mut stream, 1));
    Ok(stream)
}

pub(crate) fn event(flags: u32) -> Answer<Handle> {
    let mut event = 0;
    ok!(cu cuEventCreate(&mut event, flags));
    Ok(event)
}

pub(crate) fn memory(bytes: usize) -> Answer<u64> {
    let mut address = 0;
    ok!(cu cuMemAlloc_v2(&mut address, bytes));
    Ok(address)
}

pub(crate) fn pinned(bytes: usize) -> Answer<Pointer> {
    let mut pointer = std::ptr::null_mut();
    ok!(cu cuMemHostAlloc(&mut pointer, bytes, 3));
    // SAFETY: the driver gave so many bytes.
    unsafe { pointer.cast::<u8>().write_bytes(0, bytes) };
    Ok(pointer)
}

/// Returns the bytes at a host pointer, whose writers must be done.
pub(crate) fn bytes_at(pointer: Pointer, count: usize) -> Vec<u8> {
    // SAFETY: callers give live memory of at least so many bytes, whose writers they have waited for.
    unsafe { std::slice::from_raw_parts(pointer.cast(), count) }.to_vec()
}

/// Writes to device memory and waits.
pub(crate) fn store<T: Copy>(address: u64, values: &[T], stream: Handle) -> Answer {
    if !values.is_empty() {
        ok!(cu cuMemcpyHtoDAsync_v2(address, values.as_ptr().cast(), size_of_val(values), stream));
        ok!(cu cuStreamSynchronize(stream));
    }
    Ok(())
}

/// A block with these values.
pub(crate) fn upload<T: Copy>(values: &[T], stream: Handle) -> Answer<u64> {
    let address = memory(size_of_val(values).max(256))?;
    store(address, values, stream)?;
    Ok(address)
}

/// Reads device memory after everything in the stream.
pub(crate) fn load<T: Copy + Default>(address: u64, count: usize, stream: Handle) -> Answer<Vec<T>> {
    let mut values = vec![T::default(); count];
    ok!(cu cuMemcpyDtoHAsync_v2(values.as_mut_ptr().cast(), address, size_of_val(&values[..]), stream));
    ok!(cu cuStreamSynchronize(stream));
    Ok(values)
}

/// The values that bytes have, each once and in order.
pub(crate) fn kinds_of(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.sort_unstable();
    bytes.dedup();
    bytes
}

/// Executes every kind of small work once, so that nothing has to be loaded while a gate is closed.
pub(crate) fn warm(stream: Handle) -> Answer {
    let (block, host) = (memory(4096)?, pinned(4096)?);
    ok!(cu cuMemsetD8Async(block, 0, 4096, stream));
    ok!(cu cuMemsetD16Async(block, 0, 64, stream));
    ok!(cu cuMemsetD32Async(block, 0, 64, stream));
    ok!(cu cuMemcpyDtoHAsync_v2(host, block, 4096, stream));
    ok!(cu cuMemcpyHtoDAsync_v2(block, host.cast_const(), 4096, stream));
    ok!(cu cuMemcpyDtoDAsync_v2(block, block + 2048, 64, stream));
    ok!(cu cuMemsetD8Async(block, 0, 4096, 0));
    ok!(cu cuCtxSynchronize());
    ok!(cu cuMemFree_v2(block));
    ok!(cu cuMemFreeHost(host));
    Ok(())
}

/// Work in a stream that lasts until it is let through. It gives up by itself, so that a call that waits for it without
/// need is a wrong answer and not a standstill.
pub(crate) struct Gate(&'static AtomicBool);

unsafe extern "C" fn wait_for_gate(gate: Pointer) {
    // SAFETY: gates live for ever.
    let open = unsafe { &*gate.cast::<AtomicBool>() };
    let begun = Instant::now();
    while !open.load(Ordering::Acquire) && begun.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_micros(200));
    }
    open.store(true, Ordering::Release);
}

impl Gate {
    pub(crate) fn on(stream: Handle) -> Answer<Self> {
        let gate: &'static AtomicBool = Box::leak(Box::default());
        ok!(cu cuLaunchHostFunc(stream, Some(wait_for_gate), std::ptr::from_ref(gate).cast_mut().cast()));
        Ok(Self(gate))
    }

    pub(crate) fn open(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub(crate) fn is_open(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Whether `call` returns while this gate is closed, with the code. The gate is opened soon where the call is known
    /// to wait for it, and late where it is known to return. The context is current in `call`.
    pub(crate) fn is_passed_by(
        &self,
        context: Handle,
        known: bool,
        call: impl FnOnce() -> u32 + Send,
    ) -> Answer<(bool, u32)> {
        let limit = if known { PATIENCE / 2 } else { Duration::from_millis(400) };
        let (begun, ended) = (AtomicBool::new(false), AtomicBool::new(false));
        let (code, passed) = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let bound = cu!(cuCtxSetCurrent(context));
                begun.store(true, Ordering::Release);
                let code = if bound == 0 { call() } else { bound };
                ended.store(true, Ordering::Release);
                code
            });
            wait_until(|| begun.load(Ordering::Acquire));
            let asked = Instant::now();
            while !ended.load(Ordering::Acquire) && asked.elapsed() < limit {
                std::thread::sleep(Duration::from_millis(1));
            }
            let passed = ended.load(Ordering::Acquire) && !self.is_open();
            self.open();
            (thread.join(), passed)
        });
        Ok((passed, code.map_err(|_| "the thread of the call panicked".to_owned())?))
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}

/// Waits for a condition; false when it did not come.
pub(crate) fn wait_until(condition: impl Fn() -> bool) -> bool {
    let begun = Instant::now();
    while !condition() {
        if begun.elapsed() > PATIENCE {
            return false;
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    true
}

unsafe extern "C" fn add_one(counter: Pointer) {
    // SAFETY: counters live for ever.
    unsafe { &*counter.cast::<AtomicU32>() }.fetch_add(1, Ordering::SeqCst);
}

/// A number that a stream counts up.
pub(crate) struct Counter(&'static AtomicU32);

impl Counter {
    pub(crate) fn new() -> Self {
        Self(Box::leak(Box::default()))
    }

    pub(crate) fn count_on(&self, stream: Handle) -> u32 {
        cu!(cuLaunchHostFunc(stream, Some(add_one), std::ptr::from_ref(self.0).cast_mut().cast()))
    }

    pub(crate) fn value(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }
}

/// Runs a call on a thread of its own, with the context current there.
pub(crate) fn on_another_thread<T: Send>(context: Handle, call: impl FnOnce() -> T + Send) -> Answer<T> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| match cu!(cuCtxSetCurrent(context)) {
            0 => Ok(call()),
            code => Err(format!("cuCtxSetCurrent answered {code} on another thread")),
        });
        thread.join().map_err(|_| "a thread panicked".to_owned())?
    })
}

/// Pages of memory of this process.
pub(crate) fn pages(count: usize, protection: i32) -> Answer<Pointer> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a mapping at an address of the system's choice.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), count * 4096, protection, flags, -1, 0) };
    if start == libc::MAP_FAILED { Err(std::io::Error::last_os_error().to_string()) } else { Ok(start) }
}

pub(crate) const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// A line between two processes that carries numbers and descriptors.
pub(crate) struct Line(UnixStream);

fn text(error: std::io::Error) -> String {
    format!("the line to the other process: {error}")
}

impl Line {
    fn over(socket: UnixStream) -> Answer<Self> {
        socket.set_read_timeout(Some(2 * PATIENCE)).map_err(text)?;
        Ok(Self(socket))
    }

    pub(crate) fn send(&mut self, values: &[u64]) -> Answer {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.0.write_all(&bytes).map_err(text)
    }

    pub(crate) fn receive<const N: usize>(&mut self) -> Answer<[u64; N]> {
        let mut values = [0; N];
        for value in &mut values {
            let mut bytes = [0; 8];
            self.0.read_exact(&mut bytes).map_err(text)?;
            *value = u64::from_le_bytes(bytes);
        }
        Ok(values)
    }

    pub(crate) fn receive_handle(&mut self) -> Answer<IpcHandle> {
        self.receive().map(IpcHandle)
    }

    /// Sends a descriptor beside one byte.
    pub(crate) fn send_descriptor(&mut self, descriptor: RawFd) -> Answer {
        self.message(Some(descriptor)).map(drop)
    }

    /// Receives a descriptor.
    pub(crate) fn receive_descriptor(&mut self) -> Answer<OwnedFd> {
        let number = self.message(None)?;
        // SAFETY: the system has just made this descriptor for this process.
        Ok(unsafe { OwnedFd::from_raw_fd(number) })
    }

    fn message(&mut self, sent: Option<RawFd>) -> Answer<RawFd> {
        let mut byte = [0u8; 1];
        let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
        let mut control = [0u64; 8];
        // SAFETY: a message header of zeros has no name and no parts.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = &mut part;
        header.msg_iovlen = 1;
        header.msg_control = control.as_mut_ptr().cast();
        // SAFETY: the macros only compute, and look into the header above, whose control room is aligned and long
        // enough for one descriptor; the calls get a header whose parts outlive them.
        unsafe {
            header.msg_controllen = libc::CMSG_SPACE(4) as usize;
            let socket = self.0.as_raw_fd();
            if let Some(descriptor) = sent {
                let part = libc::CMSG_FIRSTHDR(&header);
                (*part).cmsg_level = libc::SOL_SOCKET;
                (*part).cmsg_type = libc::SCM_RIGHTS;
                (*part).cmsg_len = libc::CMSG_LEN(4) as usize;
                libc::CMSG_DATA(part).cast::<RawFd>().write_unaligned(descriptor);
                if libc::sendmsg(socket, &header, 0) != 1 {
                    return Err(text(std::io::Error::last_os_error()));
                }
                return Ok(descriptor);
            }
            if libc::recvmsg(socket, &mut header, 0) != 1 {
                return Err(text(std::io::Error::last_os_error()));
            }
            let part = libc::CMSG_FIRSTHDR(&header);
            if part.is_null() || (*part).cmsg_type != libc::SCM_RIGHTS {
                return Err("a message came without a descriptor".to_owned());
            }
            Ok(libc::CMSG_DATA(part).cast::<RawFd>().read_unaligned())
        }
    }
}

/// The other process of a rule.
pub(crate) struct Peer {
    child: Child,
    pub(crate) line: Line,
}

impl Peer {
    /// Starts this program again for the peer's part of a rule.
    pub(crate) fn start(name: &str) -> Answer<Self> {
        let (ours, theirs) = UnixStream::pair().map_err(text)?;
        let theirs = OwnedFd::from(theirs);
        // SAFETY: the descriptor is open and this process's own.
        unsafe { libc::fcntl(theirs.as_raw_fd(), libc::F_SETFD, 0) };
        let mut command = own_program()?;
        let child = command.env(PEER, name).env(LINE, theirs.as_raw_fd().to_string()).spawn().map_err(text)?;
        Ok(Self { child, line: Line::over(ours)? })
    }

    /// Waits for the peer; an error when its part went wrong.
    pub(crate) fn end(mut self) -> Answer {
        let status = self.child.wait().map_err(text)?;
        if status.success() { Ok(()) } else { Err(format!("the other process ended with {status}")) }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The peer of a broken rule would wait forever. One that has ended needs no stop.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// This program, to be started again.
pub(crate) fn own_program() -> Answer<Command> {
    let mut command = Command::new(std::env::current_exe().map_err(text)?);
    command.env_remove(PEER).env_remove(LINE);
    Ok(command)
}

/// The part of a rule that this process was started for, if it is a peer.
pub(crate) fn peer_part() -> Answer<Option<(String, Line)>> {
    let (Ok(name), Ok(number)) = (std::env::var(PEER), std::env::var(LINE)) else { return Ok(None) };
    let number: RawFd = number.parse().map_err(|_| format!("`{LINE}` holds no number"))?;
    // SAFETY: the process that started this one left the descriptor to it.
    let socket = unsafe { UnixStream::from_raw_fd(number) };
    Ok(Some((name, Line::over(socket)?)))
}
