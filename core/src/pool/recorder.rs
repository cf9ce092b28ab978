//! The trace of a program's requests for page-locked memory, in the format that `highwater bench host --replay` reads.
//!
//! Each line is a JSON object: a request, the end of a buffer, or a use by a stream. A request is written after the pool has
//! served it, and the end of a buffer before the block goes back. So the lines of a block are in their order, and no two live
//! blocks have one address.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::{self, File, Metadata};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use rustix::fs::OFlags;

use super::block::Block;
use highwater_hal::{Error, ErrorKind, Result};

/// Bytes of lines that are kept until they are written.
const BUFFER: usize = 1 << 16;

/// A trace file. The runtimes of a process that record to one file share it.
#[derive(Debug)]
pub(crate) struct Recorder {
    file: PathBuf,
    started: Instant,
    trace: Mutex<Trace>,
}

struct Trace {
    /// `None` once a write has failed.
    writer: Option<BufWriter<File>>,
    /// The numbers of the live blocks, by address.
    ids: HashMap<usize, u64>,
    next: u64,
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trace").field("next", &self.next).finish_non_exhaustive()
    }
}

/// The files of this process, by process, device and inode: a file has several paths, and a removed file loses its own. A child
/// of a fork opens its own. A recorder whose file refused a write is not listed.
///
/// A trace's lock comes before this one.
static FILES: Mutex<BTreeMap<(u32, u64, u64), Arc<Recorder>>> = Mutex::new(BTreeMap::new());

/// Returns the number of the calling thread.
fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    thread_local! {
        // Relaxed: the numbers only need to be unique.
        static NUMBER: Cell<u64> = Cell::new(NEXT.fetch_add(1, Ordering::Relaxed));
    }
    // A thread that ends has no locals.
    NUMBER.try_with(Cell::get).unwrap_or(u64::MAX)
}

impl Recorder {
    /// Creates a trace file, or returns the recorder of this process that writes it. A character device is written as it is.
    ///
    /// # Errors
    /// `InvalidArgument` if the file cannot be created, or if it is a pipe or another special file. A pipe whose reader is slow
    /// would stop the program at a request.
    pub(crate) fn open(file: &Path) -> Result<Arc<Self>> {
        let invalid = |error: io::Error| {
            let message = format!("the trace of page-locked memory cannot be written to {}: {error}", file.display());
            Error::new(ErrorKind::InvalidArgument, "host memory options", message)
                .with_hint("set `record` to a file that can be written")
        };
        let check = |metadata: &Metadata| {
            let kind = metadata.file_type();
            let is_expected = kind.is_file() || kind.is_char_device();
            if is_expected { Ok(()) } else { Err(invalid(io::Error::other("a regular file is expected"))) }
        };
        if let Ok(metadata) = fs::metadata(file) {
            check(&metadata)?;
        }
        // Not truncated yet: another runtime may be writing it. A recorder keeps its file open until a write fails, so until then
        // no other file gets the inode.
        // The file may have become a pipe since the check, and to open a pipe waits for a reader unless the flag is set.
        let mut options = File::options();
        options.write(true).create(true).truncate(false).custom_flags(libc::O_NONBLOCK);
        let writer = options.open(file).map_err(invalid)?;
        let metadata = writer.metadata().map_err(invalid)?;
        check(&metadata)?;
        // A write to a terminal waits until the terminal has room.
        rustix::fs::fcntl_setfl(&writer, OFlags::empty()).map_err(|error| invalid(error.into()))?;
        let mut files = FILES.lock();
        let key = (std::process::id(), metadata.dev(), metadata.ino());
        if let Some(recorder) = files.get(&key) {
            return Ok(Arc::clone(recorder));
        }
        if metadata.is_file() {
            writer.set_len(0).map_err(invalid)?;
        }
        let trace = Trace { writer: Some(BufWriter::with_capacity(BUFFER, writer)), ids: HashMap::new(), next: 0 };
        let recorder = Arc::new(Self { file: file.to_owned(), started: Instant::now(), trace: Mutex::new(trace) });
        files.insert(key, Arc::clone(&recorder));
        Ok(recorder)
    }

    /// Records a request that was served.
    pub(crate) fn allocated(&self, block: &Block) {
        let mut trace = self.trace.lock();
        let id = trace.next;
        trace.next += 1;
        trace.ids.insert(block.ptr.address(), id);
        // A replay allocates at least one byte.
        self.write(&mut trace, "alloc", id, Some(block.requested().max(1)));
    }

    /// Records a use by a stream. It is left out if the buffer is gone, which a graph can still use.
    pub(crate) fn used(&self, block: &Block) {
        let mut trace = self.trace.lock();
        if let Some(id) = trace.ids.get(&block.ptr.address()).copied() {
            self.write(&mut trace, "use", id, None);
        }
    }

    /// Records the end of a buffer.
    pub(crate) fn freed(&self, block: &Block) {
        let mut trace = self.trace.lock();
        if let Some(id) = trace.ids.remove(&block.ptr.address()) {
            self.write(&mut trace, "free", id, None);
        }
    }

    /// Writes the lines that are still in memory.
    pub(crate) fn flush(&self) {
        let mut trace = self.trace.lock();
        let result = trace.writer.as_mut().map_or(Ok(()), Write::flush);
        self.stop_after(&mut trace, result);
    }

    fn write(&self, trace: &mut Trace, op: &str, id: u64, bytes: Option<usize>) {
        let Some(writer) = &mut trace.writer else { return };
        let (t, thread) = (self.started.elapsed().as_nanos(), thread_number());
        let mut line = || {
            write!(writer, r#"{{"t": {t}, "thread": {thread}, "op": "{op}", "id": {id}"#)?;
            bytes.map_or(Ok(()), |bytes| write!(writer, r#", "bytes": {bytes}"#))?;
            writer.write_all(b"}\n")
        };
        let result = line();
        self.stop_after(trace, result);
    }

    /// Ends the recording after an error: a trace with a gap is of no use. A later runtime begins a new trace.
    fn stop_after(&self, trace: &mut Trace, result: io::Result<()>) {
        if let Err(error) = result {
            crate::warnings::warning!("the trace of page-locked memory in {} ends: {error}", self.file.display());
            // The lines that are still in memory are not written: the file may have another recorder soon.
            drop(trace.writer.take().map(BufWriter::into_parts));
            FILES.lock().retain(|_, recorder| !std::ptr::eq(Arc::as_ptr(recorder), self));
        }
    }
}

#[cfg(test)]
impl Recorder {
    /// Makes every later write fail.
    pub(crate) fn refuse_writes(&self) {
        let reader = File::open(&self.file).expect("the file exists");
        self.trace.lock().writer = Some(BufWriter::new(reader));
    }
}
