//! A stand-in for PyTorch. It uses PyTorch's format over raw calls of the driver and of POSIX shared memory. It shares no code with
//! the crate under test.

use std::collections::HashMap;
use std::ffi::CString;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use cudarc::driver::sys;

/// The tensors of each test.
pub(super) const TENSORS: usize = 1000;
const SEGMENTS: usize = 4;
const SEGMENT_BYTES: usize = 2 << 20;
/// The time by which [`delay`] delays.
pub(super) const DELAY: Duration = Duration::from_secs(2);
/// Slots that PyTorch's file has, and bytes before them.
const SLOTS: usize = 10_000;
const HEAD: usize = 64;

/// Returns the values of a tensor: their number, and the value of each.
pub(super) fn tensor(index: usize) -> (usize, u32) {
    (1 + index % 100, 0x5000_0000 + index as u32)
}

fn check(code: sys::CUresult) {
    assert_eq!(code as u32, 0, "the driver's code");
}

/// The eight fields, as text that this module makes and reads itself.
#[derive(Clone, Default)]
pub(super) struct Tuple {
    pub(super) device: i32,
    pub(super) handle: Vec<u8>,
    pub(super) size: usize,
    pub(super) offset: usize,
    pub(super) file: String,
    pub(super) slot: usize,
    pub(super) event: Vec<u8>,
    pub(super) waits: bool,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

impl Tuple {
    pub(super) fn text(&self) -> String {
        let (handle, file, event) = (hex(&self.handle), hex(self.file.as_bytes()), hex(&self.event));
        let Self { device, size, offset, slot, .. } = self;
        format!("{device}:{handle}:{size}:{offset}:{file}:{slot}:{event}:{}", i32::from(self.waits))
    }

    /// Removes the file of a sender that was killed. PyTorch leaves it.
    pub(super) fn remove_file(&self) {
        std::fs::remove_file(format!("/dev/shm{}", self.file)).unwrap();
    }

    pub(super) fn read(text: &str) -> Self {
        let fields: Vec<_> = text.split(':').collect();
        assert_eq!(fields.len(), 8);
        Self {
            device: fields[0].parse().unwrap(),
            handle: from_hex(fields[1]),
            size: fields[2].parse().unwrap(),
            offset: fields[3].parse().unwrap(),
            file: String::from_utf8(from_hex(fields[4])).unwrap(),
            slot: fields[5].parse().unwrap(),
            event: from_hex(fields[6]),
            waits: fields[7] == "1",
        }
    }
}

/// A file of counters that is mapped, and attached to.
pub(super) struct Counters {
    name: CString,
    at: *mut u8,
}

impl Counters {
    /// As PyTorch's allocator of shared memory: `is_new` makes the file, else it exists.
    pub(super) fn attach(name: &str, is_new: bool) -> Option<Self> {
        let name = CString::new(name).unwrap();
        let bytes = HEAD + 8 * SLOTS;
        // SAFETY: Plain calls; the mapping has the size that the file has.
        unsafe {
            let flags = libc::O_RDWR | if is_new { libc::O_CREAT | libc::O_EXCL } else { 0 };
            let file = libc::shm_open(name.as_ptr(), flags, 0o600);
            if file < 0 {
                return None;
            }
            if is_new {
                assert_eq!(libc::ftruncate(file, bytes as i64), 0);
            }
            let mut found: libc::stat = std::mem::zeroed();
            assert_eq!(libc::fstat(file, &mut found), 0);
            // PyTorch lengthens a file that is too short, which a sender would not expect.
            assert!(found.st_size as usize >= bytes, "{} bytes", found.st_size);
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let at = libc::mmap(null_mut(), bytes, access, libc::MAP_SHARED, file, 0);
            assert_ne!(at, libc::MAP_FAILED);
            libc::close(file);
            let mapped = Self { name, at: at.cast() };
            if is_new {
                mapped.users().store(1, Ordering::SeqCst)
            } else {
                mapped.users().fetch_add(1, Ordering::SeqCst);
            }
            Some(mapped)
        }
    }

    pub(super) fn users(&self) -> &AtomicI32 {
        // SAFETY: The mapping begins with the number of its users.
        unsafe { AtomicI32::from_ptr(self.at.cast()) }
    }

    fn slot(&self, slot: usize) -> *mut i64 {
        assert!(slot < SLOTS);
        // SAFETY: The slot lies in the mapping.
        unsafe { self.at.add(HEAD).cast::<i64>().add(slot) }
    }

    pub(super) fn get(&self, slot: usize) -> i64 {
        // SAFETY: The slot lies in the mapping, and other processes write to it.
        unsafe { self.slot(slot).read_volatile() }
    }

    pub(super) fn set(&self, slot: usize, count: i64) {
        // SAFETY: As above.
        unsafe { self.slot(slot).write_volatile(count) };
    }
}

impl Drop for Counters {
    fn drop(&mut self) {
        // SAFETY: Plain calls; nothing refers to the mapping.
        unsafe {
            if self.users().fetch_sub(1, Ordering::SeqCst) == 1 {
                // PyTorch's process aborts if the name is gone.
                assert_eq!(libc::shm_unlink(self.name.as_ptr()), 0, "the last user removes the name");
            }
            libc::munmap(self.at.cast(), HEAD + 8 * SLOTS);
        }
    }
}

/// Does the same as PyTorch's `_release_ipc_counter`. A file that is gone is no error.
pub(super) fn release(tuple: &Tuple) {
    if let Some(counters) = Counters::attach(&tuple.file, false) {
        counters.set(tuple.slot, counters.get(tuple.slot) - 1);
    }
}

/// The primary context and a stream.
pub(super) struct Gpu {
    pub(super) stream: sys::CUstream,
}

impl Gpu {
    pub(super) fn open() -> Self {
        let (mut context, mut stream) = (null_mut(), null_mut());
        // SAFETY: The calls write to locals.
        unsafe {
            check(sys::cuInit(0));
            check(sys::cuDevicePrimaryCtxRetain(&mut context, 0));
            check(sys::cuCtxSetCurrent(context));
            check(sys::cuStreamCreate(&mut stream, 1));
        }
        Self { stream }
    }

    pub(super) fn free_bytes(&self) -> usize {
        let (mut free, mut total) = (0, 0);
        // SAFETY: The call writes two numbers.
        check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) });
        free
    }
}

/// Delays the later work of a stream.
pub(super) fn delay(stream: sys::CUstream) {
    unsafe extern "C" fn sleep(_: *mut std::ffi::c_void) {
        std::thread::sleep(DELAY);
    }
    // SAFETY: The function takes no argument.
    check(unsafe { sys::cuLaunchHostFunc(stream, Some(sleep), null_mut()) });
}

/// A process that shares, as PyTorch with its caching allocator.
pub(super) struct Sends {
    pub(super) gpu: Gpu,
    segments: Vec<u64>,
    events: Vec<sys::CUevent>,
    pub(super) counters: Counters,
    pub(super) tuples: Vec<Tuple>,
    pub(super) free_before: usize,
}

impl Sends {
    /// Fills the tensors and shares each, in all versions of handles. The last ten come without events, as if there were too many.
    pub(super) fn all(is_late: bool) -> Self {
        let gpu = Gpu::open();
        let free_before = gpu.free_bytes();
        if is_late {
            delay(gpu.stream);
        }
        let name = format!("/torch_{}_{}_0", std::process::id(), 12_345);
        let counters = Counters::attach(&name, true).unwrap();
        let (mut segments, mut events, mut tuples) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..SEGMENTS {
            let mut segment = 0;
            // SAFETY: The call writes one number.
            check(unsafe { sys::cuMemAlloc_v2(&mut segment, SEGMENT_BYTES) });
            segments.push(segment);
        }
        for index in 0..TENSORS {
            let (values, value) = tensor(index);
            let (segment, offset) = (segments[index % SEGMENTS], 512 * (index / SEGMENTS));
            let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
            // SAFETY: The range lies in the segment, and the calls write to locals.
            unsafe {
                check(sys::cuMemsetD32Async(segment + offset as u64, value, values, gpu.stream));
                check(sys::cuIpcGetMemHandle(&mut handle, segment));
            }
            let payload = handle.reserved.map(|byte| byte as u8).to_vec();
            let head: &[u8] = match index % 4 {
                0 => &[],
                1 => &[1, b'c'],
                2 => &[2, b'c'],
                _ => &[3, b'c'],
            };
            counters.set(index, 1);
            let mut event_handle = [0_u8; 64];
            let waits = is_late || index < TENSORS - 10;
            // SAFETY: The calls write to locals; the event lives until the end.
            unsafe {
                if waits {
                    let (mut event, mut exported) = (null_mut(), sys::CUipcEventHandle { reserved: [0; 64] });
                    // Blocking, without timing, interprocess.
                    check(sys::cuEventCreate(&mut event, 1 | 2 | 4));
                    check(sys::cuEventRecord(event, gpu.stream));
                    check(sys::cuIpcGetEventHandle(&mut exported, event));
                    event_handle = exported.reserved.map(|byte| byte as u8);
                    events.push(event);
                } else {
                    check(sys::cuStreamSynchronize(gpu.stream));
                }
            }
            tuples.push(Tuple {
                device: 0,
                handle: [head, &payload].concat(),
                size: 4 * values,
                offset,
                file: name.clone(),
                slot: index,
                event: event_handle.to_vec(),
                waits,
            });
        }
        Self { gpu, segments, events, counters, tuples, free_before }
    }

    /// Shares tensors of an expandable segment: pages that are mapped one after another. Each handle names the pages of its tensor,
    /// by descriptors of this process. Four tensors lie in two pages.
    pub(super) fn in_pages() -> Self {
        const PAGES: usize = 5;
        const KIND: sys::CUmemAllocationHandleType =
            sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let gpu = Gpu::open();
        let name = format!("/torch_{}_{}_1", std::process::id(), 54_321);
        let counters = Counters::attach(&name, true).unwrap();
        // SAFETY: The structs of the driver have numbers only, for each of which 0 is valid.
        let (mut properties, mut access) =
            unsafe { std::mem::zeroed::<(sys::CUmemAllocationProp, sys::CUmemAccessDesc)>() };
        properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        properties.requestedHandleTypes = KIND;
        access.location = properties.location;
        access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let (mut base, mut descriptors) = (0, Vec::new());
        // SAFETY: The calls write to locals, and the addresses are reserved.
        unsafe {
            check(sys::cuMemAddressReserve(&mut base, PAGES * SEGMENT_BYTES, 0, 0, 0));
            for page in 0..PAGES {
                let (mut memory, mut descriptor) = (0, -1_i32);
                check(sys::cuMemCreate(&mut memory, SEGMENT_BYTES, &properties, 0));
                check(sys::cuMemMap(base + (page * SEGMENT_BYTES) as u64, SEGMENT_BYTES, 0, memory, 0));
                check(sys::cuMemExportToShareableHandle((&raw mut descriptor).cast(), memory, KIND, 0));
                check(sys::cuMemRelease(memory));
                descriptors.push(descriptor);
            }
            check(sys::cuMemSetAccess(base, PAGES * SEGMENT_BYTES, &access, 1));
        }
        let mut tuples = Vec::new();
        for index in 0..TENSORS {
            let (values, value) = tensor(index);
            let start = match index {
                // One value at the end of a page, and the rest in the next.
                4..8 => (index - 3) * SEGMENT_BYTES - 4,
                _ => index % (PAGES - 1) * SEGMENT_BYTES + (64 << 10) + 512 * (index / (PAGES - 1)),
            };
            let pages = start / SEGMENT_BYTES..(start + 4 * values).div_ceil(SEGMENT_BYTES);
            assert_eq!(pages.len(), if (4..8).contains(&index) { 2 } else { 1 });
            // SAFETY: The range lies in the mappings.
            check(unsafe { sys::cuMemsetD32Async(base + start as u64, value, values, gpu.stream) });
            let mut handle = vec![if index % 2 == 0 { 2 } else { 1 }, b'e'];
            handle.extend(std::process::id().to_le_bytes());
            // Version 1 leaves these bytes as they are.
            handle.extend(if index % 2 == 0 { [0; 4] } else { (index as u32).to_le_bytes() });
            handle.extend((SEGMENT_BYTES as u64).to_le_bytes());
            handle.extend((pages.len() as u64).to_le_bytes());
            let offset = start - pages.start * SEGMENT_BYTES;
            pages.for_each(|page| handle.extend(i32::to_le_bytes(descriptors[page])));
            counters.set(index, 1);
            let (file, event) = (name.clone(), vec![0; 64]);
            tuples.push(Tuple { device: 0, handle, size: 4 * values, offset, file, slot: index, event, waits: false });
        }
        // SAFETY: A plain call.
        check(unsafe { sys::cuStreamSynchronize(gpu.stream) });
        // Nothing of it is freed before the process ends.
        let free_before = gpu.free_bytes();
        Self { gpu, segments: Vec::new(), events: Vec::new(), counters, tuples, free_before }
    }

    pub(super) fn counts(&self) -> Vec<i64> {
        (0..TENSORS).map(|slot| self.counters.get(slot)).collect()
    }

    /// Frees everything. Returns the bytes that did not return.
    pub(super) fn end(self) -> usize {
        // SAFETY: No work is left.
        unsafe {
            check(sys::cuStreamSynchronize(self.gpu.stream));
            self.events.iter().for_each(|event| check(sys::cuEventDestroy_v2(*event)));
            self.segments.iter().for_each(|segment| check(sys::cuMemFree_v2(*segment)));
        }
        self.free_before - self.gpu.free_bytes()
    }
}

/// A process that receives, as PyTorch with its map of open handles.
#[derive(Default)]
pub(super) struct Receives {
    /// Address and number of tensors of each handle that is open.
    open: HashMap<Vec<u8>, (u64, usize)>,
    tensors: Vec<Tuple>,
}

impl Receives {
    pub(super) fn open(&mut self, gpu: &Gpu, tuple: Tuple) {
        assert!(tuple.slot < SLOTS);
        if tuple.waits {
            let mut handle = sys::CUipcEventHandle { reserved: [0; 64] };
            assert_eq!(tuple.event.len(), 64);
            handle.reserved.iter_mut().zip(&tuple.event).for_each(|(to, from)| *to = *from as _);
            let mut event = null_mut();
            // SAFETY: The calls write to locals.
            unsafe {
                check(sys::cuIpcOpenEventHandle(&mut event, handle));
                check(sys::cuStreamWaitEvent(gpu.stream, event, 0));
                check(sys::cuEventDestroy_v2(event));
            }
        }
        let open = self.open.entry(tuple.handle.clone()).or_insert_with(|| {
            // A reader of version 2 accepts these.
            let bare = match &tuple.handle[..] {
                bare if bare.len() == 64 => bare,
                [version, b'c', payload @ ..] if *version <= 2 => payload,
                other => panic!("{other:?}"),
            };
            let (mut handle, mut address) = (sys::CUipcMemHandle { reserved: [0; 64] }, 0);
            handle.reserved.iter_mut().zip(bare).for_each(|(to, from)| *to = *from as _);
            // SAFETY: The call writes one number.
            check(unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, handle, 1) });
            (address, 0)
        });
        open.1 += 1;
        self.tensors.push(tuple);
    }

    /// Compares the tensors with what was sent, in order.
    pub(super) fn compare(&self, gpu: &Gpu) {
        for (index, tuple) in self.tensors.iter().enumerate() {
            let (values, value) = tensor(index);
            assert_eq!(tuple.size, 4 * values);
            let mut read = vec![0_u32; values];
            let from = self.open[&tuple.handle].0 + tuple.offset as u64;
            // SAFETY: The range lies in the mapping, and the values live until the stream is done.
            unsafe {
                check(sys::cuMemcpyDtoHAsync_v2(read.as_mut_ptr().cast(), from, tuple.size, gpu.stream));
                check(sys::cuStreamSynchronize(gpu.stream));
            }
            assert!(read.iter().all(|read| *read == value), "tensor {index}: {read:x?}");
        }
    }

    /// Releases the tensors: the mapping, then the count.
    pub(super) fn release(self, gpu: &Gpu) {
        let Self { mut open, tensors } = self;
        for tuple in tensors {
            let mapping = open.get_mut(&tuple.handle).unwrap();
            mapping.1 -= 1;
            if mapping.1 == 0 {
                // SAFETY: Nothing uses the mapping.
                check(unsafe { sys::cuIpcCloseMemHandle(mapping.0) });
                open.remove(&tuple.handle);
            }
            // SAFETY: A plain call.
            check(unsafe { sys::cuStreamSynchronize(gpu.stream) });
            release(&tuple);
        }
    }
}
