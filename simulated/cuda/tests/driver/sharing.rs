//! Memory and events of other processes.

use super::*;
use layout::{AccessDescription, AllocationProperties, IpcHandle};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};

const SOCKET: &str = "HIGHWATER_TEST_SOCKET";

/// The other process of a scenario and the line to it.
struct Peer {
    child: Child,
    line: UnixStream,
}

impl Peer {
    /// Starts this program again, to run the peer's part of the test.
    fn start(name: &str) -> Self {
        let (line, theirs) = UnixStream::pair().unwrap();
        let theirs = OwnedFd::from(theirs);
        unsafe { libc::fcntl(theirs.as_raw_fd(), libc::F_SETFD, 0) };
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([name, "--exact", "--nocapture", "--test-threads=1"]);
        let child = command.env(SOCKET, theirs.as_raw_fd().to_string()).spawn().unwrap();
        Self { child, line }
    }

    fn end(mut self) {
        drop(self.line);
        assert!(self.child.wait().unwrap().success());
    }
}

/// The line to the process that started this one, if this is a peer.
fn line_to_exporter() -> Option<UnixStream> {
    let number = std::env::var(SOCKET).ok()?;
    Some(unsafe { UnixStream::from_raw_fd(number.parse().unwrap()) })
}

fn send(line: &mut UnixStream, bytes: &[u8]) {
    line.write_all(bytes).unwrap();
}

fn receive<const N: usize>(line: &mut UnixStream) -> [u8; N] {
    let mut bytes = [0; N];
    line.read_exact(&mut bytes).unwrap();
    bytes
}

fn export(ptr: u64) -> IpcHandle {
    let mut handle = IpcHandle([0; 64]);
    ok!(cuIpcGetMemHandle(&mut handle, ptr));
    handle
}

#[test]
fn memory_is_opened_by_64_bytes() {
    let name = "sharing::memory_is_opened_by_64_bytes";
    process::alone(name, &[("HIGHWATER_MOCK", "devices=2")], || {
        start();
        if let Some(mut line) = line_to_exporter() {
            let handle = IpcHandle(receive(&mut line));
            let (mut ptr, mut again) = (0, 0);
            assert_eq!(cu!(cuIpcOpenMemHandle_v2(&mut ptr, handle, 0)), 1);
            ok!(cuIpcOpenMemHandle_v2(&mut ptr, handle, 1));
            ok!(cuIpcOpenMemHandle_v2(&mut again, handle, 1));
            assert_eq!(ptr, again);
            assert_eq!((byte_at(ptr), byte_at(ptr + 99_999)), (0x5a, 0x5a));
            let mut other = IpcHandle([0; 64]);
            assert_eq!(cu!(cuIpcGetMemHandle(&mut other, ptr)), 1, "a re-export");
            assert_eq!(cu!(cuMemFree_v2(ptr)), 1);
            let stream = stream();
            ok!(cuMemsetD8Async(ptr, 0xc1, 100_000, stream));
            ok!(cuStreamSynchronize(stream));
            ok!(cuIpcCloseMemHandle(ptr));
            assert_eq!(byte_at(ptr), 0xc1, "one close of two opens");
            assert_eq!(cu!(cuIpcCloseMemHandle(ptr + 8)), 1);
            if devices() > 1 {
                // The other device has a pointer of its own.
                let (mut first, mut second) = (null_mut(), null_mut());
                ok!(cuCtxGetCurrent(&mut first));
                ok!(cuDevicePrimaryCtxRetain(&mut second, 1));
                ok!(cuCtxSetCurrent(second));
                let mut far = 0;
                ok!(cuIpcOpenMemHandle_v2(&mut far, handle, 1));
                assert_ne!(far, ptr);
                assert_eq!(byte_at(far), 0xc1);
                let mut ordinal = 9;
                ok!(cuPointerGetAttribute((&raw mut ordinal).cast(), 9, far));
                assert_eq!(ordinal, 1);
                ok!(cuIpcCloseMemHandle(far));
                ok!(cuCtxSetCurrent(first));
            }
            ok!(cuIpcCloseMemHandle(ptr));
            assert_eq!(cu!(cuIpcCloseMemHandle(ptr)), 1);
            let mut byte = 0u8;
            assert_eq!(cu!(cuMemcpyDtoH_v2((&raw mut byte).cast(), ptr, 1)), 1);
            let mut altered = handle;
            altered.0[20] ^= 1;
            assert_eq!(cu!(cuIpcOpenMemHandle_v2(&mut ptr, altered, 1)), 1);
            send(&mut line, &[1]);
            return;
        }
        let (ptr, stream) = (memory(100_000), stream());
        ok!(cuMemsetD8Async(ptr, 0x5a, 100_000, stream));
        ok!(cuStreamSynchronize(stream));
        let handle = export(ptr);
        assert_eq!(export(ptr + 4096).0, handle.0);
        assert_ne!(export(memory(4096)).0, handle.0);
        let mut own = 0;
        assert_eq!(cu!(cuIpcOpenMemHandle_v2(&mut own, handle, 1)), 201);
        let (mut ordered, mut refused) = (0, IpcHandle([0; 64]));
        ok!(cuMemAllocAsync(&mut ordered, 4096, stream));
        for other in [ordered, pinned(64).addr() as u64, 64] {
            assert_eq!(cu!(cuIpcGetMemHandle(&mut refused, other)), 1);
        }
        let mut peer = Peer::start(name);
        send(&mut peer.line, &handle.0);
        receive::<1>(&mut peer.line);
        assert_eq!((byte_at(ptr), byte_at(ptr + 99_999)), (0xc1, 0xc1));
        peer.end();
    });
}

#[test]
fn an_event_of_another_process_is_waited_for() {
    let name = "sharing::an_event_of_another_process_is_waited_for";
    process::alone(name, &[], || {
        start();
        if let Some(mut line) = line_to_exporter() {
            let mut done = null_mut();
            ok!(cuIpcOpenEventHandle(&mut done, IpcHandle(receive(&mut line))));
            assert_eq!(cu!(cuEventQuery(done)), 600);
            let mut again = IpcHandle([0; 64]);
            assert_ne!(cu!(cuIpcGetEventHandle(&mut again, done)), 0);
            let stream = stream();
            ok!(cuStreamWaitEvent(stream, done, 0));
            assert_eq!(cu!(cuStreamQuery(stream)), 600);
            send(&mut line, &[1]);
            ok!(cuStreamSynchronize(stream));
            ok!(cuEventSynchronize(done));
            ok!(cuEventDestroy_v2(done));
            send(&mut line, &[2]);
            return;
        }
        let (done, stream) = (event(6), stream());
        let mut handle = IpcHandle([0; 64]);
        assert_eq!(cu!(cuIpcGetEventHandle(&mut handle, event(2))), 400);
        ok!(cuIpcGetEventHandle(&mut handle, done));
        let gate = Gate::on(stream);
        ok!(cuEventRecord(done, stream));
        let mut peer = Peer::start(name);
        send(&mut peer.line, &handle.0);
        receive::<1>(&mut peer.line);
        gate.open();
        receive::<1>(&mut peer.line);
        peer.end();
    });
}

#[test]
fn a_handle_of_a_process_that_ended_is_stale() {
    let name = "sharing::a_handle_of_a_process_that_ended_is_stale";
    process::alone(name, &[], || {
        start();
        if let Some(mut line) = line_to_exporter() {
            send(&mut line, &export(memory(4096)).0);
            return;
        }
        let mut peer = Peer::start(name);
        let handle = IpcHandle(receive(&mut peer.line));
        peer.end();
        let mut ptr = 0;
        assert_eq!(cu!(cuIpcOpenMemHandle_v2(&mut ptr, handle, 1)), 400);
    });
}

const GRANULARITY: usize = 2 << 20;

fn properties(handle_types: u32) -> AllocationProperties {
    AllocationProperties {
        kind: 1,
        handle_types,
        location_kind: 1,
        location: 0,
        win32_data: null_mut(),
        compression: 0,
        rdma: 0,
        usage: 0,
        reserved: [0; 4],
    }
}

fn access(device: i32) -> AccessDescription {
    AccessDescription { location_kind: 1, location: device, flags: 3 }
}

#[test]
fn virtual_memory_is_mapped_where_it_was_reserved() {
    let settings = [("HIGHWATER_MOCK", "devices=2,memory=16MiB")];
    process::alone("sharing::virtual_memory_is_mapped_where_it_was_reserved", &settings, || {
        start();
        let stream = stream();
        let mut bytes = 0;
        ok!(cuMemGetAllocationGranularity(&mut bytes, &properties(1), 1));
        assert_eq!(bytes, GRANULARITY);
        let mut handle = 0;
        for (bytes, types, code) in
            [(0, 1, 1), (4096, 1, 1), (GRANULARITY, 8, 800), (GRANULARITY, 9, 800), (1 << 50, 1, 2)]
        {
            assert_eq!(cu!(cuMemCreate(&mut handle, bytes, &properties(types), 0)), code, "{bytes} {types}");
        }
        let (mut low, mut high, mut base) = (0, 0, 0);
        ok!(cuMemCreate(&mut low, GRANULARITY, &properties(1), 0));
        ok!(cuMemCreate(&mut high, GRANULARITY, &properties(0), 0));
        assert_eq!(cu!(cuMemAddressReserve(&mut base, 100, 0, 0, 0)), 1);
        ok!(cuMemAddressReserve(&mut base, 2 * GRANULARITY, 0, 0, 0));
        assert!(base.is_multiple_of(GRANULARITY as u64));
        let middle = base + GRANULARITY as u64;
        assert_eq!(cu!(cuMemMap(base + 4096, GRANULARITY, 0, low, 0)), 1);
        ok!(cuMemMap(base, GRANULARITY, 0, low, 0));
        assert_eq!(cu!(cuMemMap(base, GRANULARITY, 0, low, 0)), 1);
        assert_eq!(cu!(cuMemMap(middle, 2 * GRANULARITY, 0, high, 0)), 1);
        ok!(cuMemMap(middle, GRANULARITY, 0, high, 0));
        assert_eq!(cu!(cuMemsetD8Async(base, 1, 64, stream)), 1, "nobody has access yet");
        assert_eq!(cu!(cuMemSetAccess(base, 4096, &access(0), 1)), 1);
        ok!(cuMemSetAccess(base, 2 * GRANULARITY, &access(0), 1));
        // A fill and a copy over the border of the two.
        ok!(cuMemsetD8Async(base, 3, 2 * GRANULARITY, stream));
        let target = memory(8192);
        ok!(cuMemcpyDtoDAsync_v2(target, middle - 4096, 8192, stream));
        ok!(cuStreamSynchronize(stream));
        assert_eq!((byte_at(target), byte_at(target + 8191)), (3, 3));
        if devices() > 1 {
            // One address for both devices.
            let mut second = null_mut();
            ok!(cuDevicePrimaryCtxRetain(&mut second, 1));
            ok!(cuMemSetAccess(base, 2 * GRANULARITY, &access(1), 1));
        }
        let mut refused = IpcHandle([0; 64]);
        assert_eq!(cu!(cuIpcGetMemHandle(&mut refused, base)), 1);
        assert_eq!(cu!(cuMemFree_v2(base)), 1);
        let mut same = 0;
        ok!(cuMemRetainAllocationHandle(&mut same, (base + 64) as *mut c_void));
        assert_eq!(same, low);
        assert_eq!(cu!(cuMemRetainAllocationHandle(&mut same, target as *mut c_void)), 1);
        ok!(cuMemRelease(same));
        ok!(cuMemRelease(low));
        if is_simulated() {
            assert_eq!(cu!(cuMemRelease(low)), 1);
        }
        assert_eq!(byte_at(base), 3, "memory that is mapped stays");
        let mut descriptor = -1;
        assert_eq!(cu!(cuMemExportToShareableHandle((&raw mut descriptor).cast(), high, 1, 0)), 1);
        assert_eq!(cu!(cuMemAddressFree(base, 2 * GRANULARITY)), 1);
        assert_eq!(cu!(cuMemUnmap(base, 4096)), 1);
        ok!(cuMemUnmap(base, 2 * GRANULARITY));
        ok!(cuMemRelease(high));
        ok!(cuMemAddressFree(base, 2 * GRANULARITY));
        let (mut free, mut total) = (0, 0);
        ok!(cuMemGetInfo_v2(&mut free, &mut total));
        if is_simulated() {
            assert_eq!(free, total - 8192);
        }
    });
}

#[test]
fn virtual_memory_travels_by_one_descriptor() {
    let name = "sharing::virtual_memory_travels_by_one_descriptor";
    process::alone(name, &[], || {
        start();
        let stream = stream();
        let map = |handle: u64| {
            let mut base = 0;
            ok!(cuMemAddressReserve(&mut base, GRANULARITY, 0, 0, 0));
            ok!(cuMemMap(base, GRANULARITY, 0, handle, 0));
            ok!(cuMemSetAccess(base, GRANULARITY, &access(0), 1));
            base
        };
        if let Some(mut line) = line_to_exporter() {
            let number = i32::from_le_bytes(receive(&mut line));
            let mut handle = 0;
            ok!(cuMemImportFromShareableHandle(&mut handle, number as usize as *mut c_void, 1));
            let base = map(handle);
            assert_eq!(byte_at(base + GRANULARITY as u64 - 1), 0x3c);
            ok!(cuMemsetD8Async(base, 0xc2, GRANULARITY, stream));
            ok!(cuStreamSynchronize(stream));
            ok!(cuMemUnmap(base, GRANULARITY));
            ok!(cuMemRelease(handle));
            send(&mut line, &[1]);
            return;
        }
        let (mut handle, mut descriptor) = (0, -1);
        ok!(cuMemCreate(&mut handle, GRANULARITY, &properties(1), 0));
        let base = map(handle);
        ok!(cuMemsetD8Async(base, 0x3c, GRANULARITY, stream));
        ok!(cuStreamSynchronize(stream));
        ok!(cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle, 1, 0));
        assert_eq!(unsafe { libc::fcntl(descriptor, libc::F_GETFD) }, libc::FD_CLOEXEC);
        let mut other = 0;
        for wrong in [-1isize, 0, 1_000_000] {
            assert_eq!(cu!(cuMemImportFromShareableHandle(&mut other, wrong as *mut c_void, 1)), 1);
        }
        // A peer that inherits it.
        unsafe { libc::fcntl(descriptor, libc::F_SETFD, 0) };
        let mut peer = Peer::start(name);
        send(&mut peer.line, &descriptor.to_le_bytes());
        receive::<1>(&mut peer.line);
        assert_eq!((byte_at(base), byte_at(base + GRANULARITY as u64 - 1)), (0xc2, 0xc2));
        peer.end();
        // In the same process, too, it is the same memory.
        ok!(cuMemImportFromShareableHandle(&mut other, descriptor as usize as *mut c_void, 1));
        assert_ne!(other, handle);
        assert_eq!(byte_at(map(other)), 0xc2);
        unsafe { libc::close(descriptor) };
    });
}
