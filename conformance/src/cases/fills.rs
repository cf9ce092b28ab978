//! Fills: each width of pattern, and exactly the requested number of elements.

use highwater_hal::{Backend, FillPattern};

use super::copies::{LARGE, compared_parts, needs_free};
use crate::case::{CaseResult, cases, check};
use crate::device::{Block, DEVICE, Pinned, Stream};
use crate::retry::{Attempt, until_conclusive};
use crate::stream_load::{Direction, StreamLoad};

cases! {
    group "fills";
    write_bytes: ["fill.exact"] => exact(FillPattern::U8(0xa7), &[0xa7]);
    write_halves: ["fill.exact"] => exact(FillPattern::U16(0xbeef), &0xbeef_u16.to_ne_bytes());
    write_words: ["fill.exact"];
    write_every_byte_of_a_pattern: ["fill.exact"];
    above_sixty_four_mebibytes_are_exact: ["fill.exact"];
    of_nothing_do_nothing: ["fill.zero"];
    run_in_order: ["fill.ordered"];
    run_after_pending_work: ["fill.ordered"];
}

/// Fills ranges of a block and compares the whole block with the same fills on the CPU.
fn exact(backend: &dyn Backend, pattern: FillPattern, element: &[u8]) -> CaseResult {
    let stream = Stream::new(backend)?;
    let width = pattern.bytes();
    for (first, count) in [(0, 1), (1, 1), (3, 2), (5, 63), (64, 64), (7, 1000), (1, 4095), (16, 65_536)] {
        let bytes = (first + count + 37) * width;
        let block = Block::filled(backend, bytes, 0xee)?;
        let mut expected = vec![0xee; bytes];
        let range = first * width..(first + count) * width;
        expected[range.clone()].chunks_exact_mut(width).for_each(|chunk| chunk.copy_from_slice(element));
        stream.fill(block.span(range), pattern)?;
        stream.synchronize()?;
        let got = block.read()?;
        let wrong = (0..bytes).find(|&at| got[at] != expected[at]);
        check!(
            wrong.is_none(),
            "a fill of {count} elements of {width} bytes at element {first}: byte {} is {:#04x}, expected {:#04x}",
            wrong.unwrap_or_default(),
            got[wrong.unwrap_or_default()],
            expected[wrong.unwrap_or_default()]
        );
    }
    Ok(())
}

fn write_words(backend: &dyn Backend) -> CaseResult {
    exact(backend, FillPattern::U32(0x0123_4567), &0x0123_4567_u32.to_ne_bytes())
}

fn write_every_byte_of_a_pattern(backend: &dyn Backend) -> CaseResult {
    // A driver may treat a pattern of equal bytes differently from one of different bytes.
    for word in [0_u32, u32::MAX, 0x5555_5555, 0x0000_00ff, 0xff00_0000, 0x00ff_00ff] {
        exact(backend, FillPattern::U32(word), &word.to_ne_bytes())?;
        exact(backend, FillPattern::U16(word as u16), &(word as u16).to_ne_bytes())?;
    }
    Ok(())
}

fn of_nothing_do_nothing(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let block = Block::filled(backend, 256, 3)?;
    for pattern in [FillPattern::U8(9), FillPattern::U16(9), FillPattern::U32(9)] {
        for start in [0, 128, 256] {
            stream.fill(block.span(start..start), pattern)?;
        }
    }
    stream.synchronize()?;
    check!(block.read()? == [3; 256], "a fill of 0 elements wrote something");
    Ok(())
}

fn run_in_order(backend: &dyn Backend) -> CaseResult {
    let stream = Stream::new(backend)?;
    let block = Block::filled(backend, 1 << 20, 0)?;
    for byte in 1..=200 {
        stream.set(block.all(), byte)?;
    }
    // A smaller last fill could overtake the large ones.
    stream.set(block.span(0..64), 201)?;
    stream.synchronize()?;
    let got = block.read()?;
    check!(got[..64] == [201; 64], "the beginning does not hold the bytes of the last fill");
    check!(got[64..].iter().all(|&byte| byte == 200), "the rest does not hold the bytes of the fill before the last");
    Ok(())
}

fn run_after_pending_work(backend: &dyn Backend) -> CaseResult {
    let busy = StreamLoad::new(backend, DEVICE, Direction::ToDevice)?;
    until_conclusive("a fill waits for the work before it", |load| {
        let (source, copied) = (Block::filled(backend, 4096, 1)?, Block::filled(backend, 4096, 0)?);
        let stream = Stream::new(backend)?;
        busy.enqueue(&stream, load)?;
        stream.copy(copied.all(), source.all())?;
        stream.set(source.all(), 2)?;
        let pending = stream.is_pending()?;
        stream.synchronize()?;
        check!(copied.read()? == [1; 4096], "a fill overtook a copy that was enqueued before it");
        check!(source.read()? == [2; 4096], "a fill did not arrive");
        Ok(Attempt::seen(pending))
    })
}

/// Counts and sizes of more than 26 bits. Comparing all of the bytes would take most of the time.
fn above_sixty_four_mebibytes_are_exact(backend: &dyn Backend) -> CaseResult {
    needs_free(backend, DEVICE, 2 * LARGE)?;
    let stream = Stream::new(backend)?;
    let (block, pinned) = (Block::new(backend, LARGE)?, Pinned::new(backend, LARGE)?);
    for (round, width) in [1, 2, 4].into_iter().enumerate() {
        let (byte, bytes) = (0x31 + round as u8, LARGE / width * width);
        let (pattern, element) = match width {
            1 => (FillPattern::U8(byte), vec![byte]),
            2 => (FillPattern::U16(u16::from_ne_bytes([byte, 0x42])), vec![byte, 0x42]),
            _ => (FillPattern::U32(u32::from_ne_bytes([byte, 0x42, 0x53, 0x64])), vec![byte, 0x42, 0x53, 0x64]),
        };
        // The bytes before each fill are those of the last one. Before the first, they may be those of an earlier run.
        if round == 0 {
            stream.set(block.all(), 0xee)?;
        }
        stream.fill(block.span(0..bytes), pattern)?;
        stream.copy(pinned.all(), block.all())?;
        stream.synchronize()?;
        for part in compared_parts() {
            let part = part.start..part.end.min(bytes);
            // SAFETY: the stream was synchronized, and nothing was enqueued on this memory since.
            let got = unsafe { pinned.bytes_now(part.clone()) };
            let wrong = part.clone().zip(got).find(|(place, got)| **got != element[place % width]);
            check!(
                wrong.is_none(),
                "a fill of {bytes} bytes with elements of {width}: byte {} is {:#04x}, expected {:#04x}",
                wrong.map_or(0, |(place, _)| place),
                wrong.map_or(0, |(_, got)| *got),
                wrong.map_or(0, |(place, _)| element[place % width])
            );
        }
    }
    Ok(())
}
