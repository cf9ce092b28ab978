//! Memory of a device that holds zeros, for products that must not read their factors.

use parking_lot::Mutex;

use super::calls::Calls;
use super::raw::RawStream;
use highwater_hal::DevicePtr;

/// The smallest block of zeros. It suffices for most products.
const LEAST: usize = 64 << 10;

/// Blocks of zeros of one device, by address and bytes. The blocks are never written again and never freed, because graphs
/// may read them at any time. They therefore belong to the vendor's library, not to one opening of the library.
#[derive(Debug, Default)]
pub struct Zeros(Mutex<Vec<(DevicePtr, usize)>>);

impl Zeros {
    /// Returns the address of `bytes` zeros on the current device. The calling thread must be in the relaxed capture mode.
    /// The zeros are written before this call returns, so products on any stream can read them.
    ///
    /// # Errors
    /// The vendor's code.
    pub fn find(&self, calls: &Calls, stream_flags: u32, bytes: usize) -> Result<DevicePtr, i32> {
        let found = self.0.lock().iter().find(|block| block.1 >= bytes).map(|block| block.0);
        if let Some(address) = found {
            return Ok(address);
        }
        // Each block is at least twice as large as the previous one, so there are few of them.
        let bytes = bytes.checked_next_power_of_two().unwrap_or(bytes).max(LEAST);
        let address = make(calls, stream_flags, bytes)?;
        self.0.lock().push((address, bytes));
        Ok(address)
    }
}

/// Allocates memory of the current device and fills it with zeros.
fn make(calls: &Calls, stream_flags: u32, bytes: usize) -> Result<DevicePtr, i32> {
    let done = |code| if code == 0 { Ok(()) } else { Err(code) };
    let (mut address, mut stream) = (DevicePtr::new(0), RawStream::NULL);
    // SAFETY: Each call writes one number, which outlives it.
    unsafe {
        done((calls.mem_alloc)(&mut address, bytes))?;
        // The fill runs on a stream of its own. On another stream, it could be captured, or a default stream could wait
        // for it.
        let filled = done((calls.stream_create_with_priority)(&mut stream, stream_flags, 0)).and_then(|()| {
            let filled = done((calls.memset_d8_async)(address, 0, bytes, stream));
            let filled = filled.and_then(|()| done((calls.stream_synchronize)(stream)));
            // The stream is idle, or the device is lost.
            filled.and(done((calls.stream_destroy)(stream)))
        });
        if filled.is_err() {
            (calls.mem_free)(address);
        }
        filled.map(|()| address)
    }
}
