//! The blocks of the pool by address: ten bytes for each block.
//!
//! Addresses are divided into chunks of 2 MiB. A chunk lists the blocks that begin in it, in the order of their addresses.

use std::collections::BTreeMap;

use super::block::OwnedBlock;

const CHUNK: usize = 2 << 20;
/// Blocks begin at multiples of this, as does all page-locked memory.
const UNIT: usize = 64;
/// Blocks by which the list of a chunk grows. With blocks of 4 KiB, a full list has no room left over.
const STEP: usize = 64;

/// Blocks that do not overlap.
#[derive(Debug, Default)]
pub(crate) struct BlockTable(BTreeMap<usize, Chunk>);

#[derive(Debug, Default)]
struct Chunk {
    /// Where the blocks begin, in units from the start of the chunk.
    starts: Vec<u16>,
    blocks: Vec<OwnedBlock>,
}

/// Returns the number of an address's chunk, and the unit inside it.
fn place_of(address: usize) -> (usize, u16) {
    // A chunk has 32,768 units.
    (address / CHUNK, (address % CHUNK / UNIT) as u16)
}

impl BlockTable {
    pub(crate) fn insert(&mut self, block: OwnedBlock) {
        let (chunk, start) = place_of(block.ptr.address());
        let chunk = self.0.entry(chunk).or_default();
        let at = chunk.starts.partition_point(|other| *other < start);
        if chunk.starts.len() == chunk.starts.capacity() {
            // Short lists double, so that a few large blocks do not pay for many.
            let more = chunk.starts.len().clamp(2, STEP);
            chunk.starts.reserve_exact(more);
            chunk.blocks.reserve_exact(more);
        }
        chunk.starts.insert(at, start);
        chunk.blocks.insert(at, block);
    }

    /// Removes the block that begins at an address, if there is one.
    pub(crate) fn remove(&mut self, address: usize) {
        let (number, start) = place_of(address);
        let Some(chunk) = self.0.get_mut(&number) else { return };
        if let Ok(at) = chunk.starts.binary_search(&start) {
            chunk.starts.remove(at);
            chunk.blocks.remove(at);
        }
        if chunk.starts.is_empty() {
            self.0.remove(&number);
        }
    }

    /// Returns the block that contains an address.
    pub(crate) fn containing(&self, address: usize) -> Option<&OwnedBlock> {
        let (number, start) = place_of(address);
        let own = self.0.get(&number);
        let before = own.and_then(|chunk| {
            let after = chunk.starts.partition_point(|other| *other <= start);
            chunk.blocks.get(after.checked_sub(1)?)
        });
        let block = before.or_else(|| self.0.range(..number).next_back()?.1.blocks.last())?;
        (address - block.ptr.address() < block.bytes()).then_some(block)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &OwnedBlock> {
        self.0.values().flat_map(|chunk| &chunk.blocks)
    }
}
