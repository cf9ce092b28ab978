//! The memory of the cells: two blocks of each kind, which each cell fills again.

use highwater_simulated_harness::Answer;

use crate::calls::{Access, Properties, cu, ok};
use crate::rig::{READ_WRITE, memory, pages, pinned};

/// The bytes of a block. A smaller block could share a piece of the device's memory with others.
pub(crate) const SIZE: usize = 2 << 20;
/// The bytes at the beginning of a block that have known contents.
pub(crate) const FILLED: usize = 8192;
/// The bytes of the blocks before the call.
pub(crate) const OLD: u8 = 0x11;
pub(crate) const NEW: u8 = 0x22;

/// Kinds of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Memory {
    Plain,
    Pool,
    Mapped,
    Pinned,
    Registered,
    Pageable,
}

impl Memory {
    pub(crate) const ALL: [Self; 6] =
        [Self::Plain, Self::Pool, Self::Mapped, Self::Pinned, Self::Registered, Self::Pageable];
    /// The kinds that the device reads and writes.
    pub(crate) const OF_DEVICE: [Self; 5] = [Self::Plain, Self::Pool, Self::Mapped, Self::Pinned, Self::Registered];
    /// The kinds that the CPU reads and writes.
    pub(crate) const OF_HOST: [Self; 3] = [Self::Pinned, Self::Registered, Self::Pageable];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Pool => "pool",
            Self::Mapped => "mapped",
            Self::Pinned => "pinned",
            Self::Registered => "registered",
            Self::Pageable => "pageable",
        }
    }

    fn is_host(self) -> bool {
        Self::OF_HOST.contains(&self)
    }
}

/// Two blocks of each kind: destinations and sources.
pub(crate) struct Blocks([[u64; 6]; 2]);

impl Blocks {
    pub(crate) fn new(stage: usize) -> Answer<Self> {
        let one = |kind: Memory| -> Answer<u64> {
            Ok(match kind {
                Memory::Plain => memory(SIZE)?,
                Memory::Pool => {
                    let mut address = 0;
                    ok!(cu cuMemAllocAsync(&mut address, SIZE, stage));
                    ok!(cu cuStreamSynchronize(stage));
                    address
                }
                Memory::Mapped => map()?.0,
                Memory::Pinned => pinned(SIZE)?.expose_provenance() as u64,
                Memory::Registered => {
                    let start = pages(SIZE / 4096, READ_WRITE)?;
                    ok!(cu cuMemHostRegister_v2(start, SIZE, 1));
                    start.expose_provenance() as u64
                }
                Memory::Pageable => pages(SIZE / 4096, READ_WRITE)?.expose_provenance() as u64,
            })
        };
        let mut blocks = [[0; 6]; 2];
        for side in &mut blocks {
            for kind in Memory::ALL {
                side[kind as usize] = one(kind)?;
            }
        }
        Ok(Self(blocks))
    }

    pub(crate) fn dst(&self, kind: Memory) -> u64 {
        self.0[0][kind as usize]
    }

    pub(crate) fn src(&self, kind: Memory) -> u64 {
        self.0[1][kind as usize]
    }

    /// Fills the beginning of a destination and of a source.
    pub(crate) fn reset(&self, (dst, src): (Memory, Memory), bytes: usize, stage: usize) -> Answer {
        for (address, kind, value) in [(self.dst(dst), dst, OLD), (self.src(src), src, NEW)] {
            if kind.is_host() {
                // SAFETY: the block is at least that long, and the work of earlier cells is done.
                unsafe { host(address).cast::<u8>().write_bytes(value, bytes) };
            } else {
                ok!(cu cuMemsetD8Async(address, value, bytes, stage));
            }
        }
        ok!(cu cuStreamSynchronize(stage));
        Ok(())
    }

    /// Fills every block.
    pub(crate) fn reset_all(&self, stage: usize) -> Answer {
        Memory::ALL.into_iter().try_for_each(|kind| self.reset((kind, kind), SIZE, stage))
    }

    /// Reads memory of any kind.
    pub(crate) fn read(&self, address: u64, count: usize, stage: usize) -> Answer<Vec<u8>> {
        let in_host = |kind: &Memory| {
            kind.is_host()
                && self
                    .0
                    .iter()
                    .any(|side| (side[*kind as usize]..side[*kind as usize] + SIZE as u64).contains(&address))
        };
        if Memory::ALL.iter().any(in_host) {
            // SAFETY: the range lies in a block of this process, and the work of the cell is done.
            return Ok(unsafe { std::slice::from_raw_parts(host(address).cast::<u8>(), count) }.to_vec());
        }
        crate::rig::load::<u8>(address, count, stage)
    }
}

/// A host address as a pointer.
pub(crate) fn host(address: u64) -> *mut std::ffi::c_void {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// Reserves, creates and maps a block: its address and its handle.
pub(crate) fn map() -> Answer<(u64, u64)> {
    let (mut handle, mut address) = (0, 0);
    ok!(cu cuMemCreate(&mut handle, SIZE, &Properties::with_handles(1), 0));
    ok!(cu cuMemAddressReserve(&mut address, SIZE, 0, 0, 0));
    ok!(cu cuMemMap(address, SIZE, 0, handle, 0));
    ok!(cu cuMemSetAccess(address, SIZE, &Access::read_write(0), 1));
    Ok((address, handle))
}
