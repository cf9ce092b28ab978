//! Two-dimensional copies: what they refuse, copies of nothing, and rows in memory and on streams of each kind.
//!
//! The table `transfers` has their shapes, alignments and directions.

use highwater_hal::{Backend, CopyShape, Result};

use super::copies::needs_free;
use super::kinds::StreamKind;
use super::memory::{Maker, makers};
use crate::case::{CaseResult, cases, check, check_error, on_devices};
use crate::device::{Block, DEVICE, Pinned, Span, Stream, read_span};
use crate::random::Random;
use crate::retry::{Attempt, until_conclusive};
use crate::stream_load::{Direction, StreamLoad};

cases! {
    group "rows";
    of_nothing_do_nothing: ["copy-2d.zero"];
    between_devices_of_nothing_do_nothing: ["copy-2d.zero"] needs [TWO_DEVICES, has::peer_copy];
    pitches_below_the_width_are_refused: ["copy-2d.pitch"];
    pitches_between_devices_are_checked: ["copy-2d.pitch"] needs [TWO_DEVICES, has::peer_copy];
    columns_of_one_block_are_exact: ["copy-2d.exact"];
    in_memory_of_each_kind_are_exact: ["copy-2d.exact"];
    of_many_rows_are_exact: ["copy-2d.exact"];
    pitches_may_be_large: ["copy-2d.exact", "copy-2d.pitch"];
    of_more_than_four_gibibytes_are_exact: ["copy-2d.exact"];
    between_devices_of_more_than_four_gibibytes_are_exact: ["copy-2d.exact"] needs [TWO_DEVICES, has::peer_copy];
    across_mappings_are_exact: ["copy-2d.exact", "mapped.contiguous"] needs [has::mapped_memory];
    run_in_order_on_each_kind_of_stream: ["copy-2d.ordered", "copy-2d.exact", "stream.order"];
    run_after_pending_work: ["copy-2d.ordered"];
}

const BYTES: usize = 4096;

/// Shapes with nothing to copy.
const NOTHING: [CopyShape; 5] = [
    CopyShape::new(0, 0),
    CopyShape::new(16, 0),
    CopyShape::new(0, 16),
    CopyShape::new(0, 4).with_src_pitch(64).with_dst_pitch(32),
    CopyShape::new(8, 0).with_src_pitch(64),
];

/// Shapes with a pitch that is too small: of the source, of the destination, of both, for one row, and without rows.
const NARROW: [CopyShape; 6] = [
    CopyShape::new(16, 8).with_src_pitch(15),
    CopyShape::new(16, 8).with_dst_pitch(15),
    CopyShape::new(16, 8).with_src_pitch(0).with_dst_pitch(0),
    CopyShape::new(1, 8).with_dst_pitch(0),
    CopyShape::new(16, 1).with_src_pitch(8),
    CopyShape::new(16, 0).with_dst_pitch(15),
];

fn of_nothing_do_nothing(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let stream = Stream::on(backend, device)?;
        let (block, other) =
            (Block::filled_on(backend, device, BYTES, 1)?, Block::filled_on(backend, device, BYTES, 2)?);
        let pinned = Pinned::holding(backend, &[3; BYTES])?;
        for shape in NOTHING {
            for at in [0, 100, BYTES] {
                stream.copy_rows(block.span(at..BYTES), other.span(at..BYTES), shape)?;
                stream.copy_rows(block.span(at..BYTES), pinned.span(at..BYTES), shape)?;
                stream.copy_rows(pinned.span(at..BYTES), other.span(at..BYTES), shape)?;
            }
        }
        stream.synchronize()?;
        check!(
            block.read()? == [1; BYTES] && other.read()? == [2; BYTES] && pinned.read()? == [3; BYTES],
            "a copy of no rows, or of rows of 0 bytes, changed something"
        );
        Ok(())
    })
}

fn between_devices_of_nothing_do_nothing(backend: &dyn Backend) -> CaseResult {
    let (near, far) = (Block::filled_on(backend, 0, BYTES, 1)?, Block::filled_on(backend, 1, BYTES, 2)?);
    for on in [0, 1] {
        let stream = Stream::on(backend, on)?;
        for shape in NOTHING {
            stream.copy_rows(near.all(), far.all(), shape)?;
            stream.copy_rows(far.all(), near.all(), shape)?;
        }
        stream.synchronize()?;
    }
    check!(
        near.read()? == [1; BYTES] && far.read()? == [2; BYTES],
        "a copy of nothing between devices changed something"
    );
    Ok(())
}

fn pitches_below_the_width_are_refused(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let stream = Stream::on(backend, device)?;
        let (block, other) =
            (Block::filled_on(backend, device, BYTES, 1)?, Block::filled_on(backend, device, BYTES, 2)?);
        let pinned = Pinned::holding(backend, &[3; BYTES])?;
        for shape in NARROW {
            let copies = [
                ("on the device", stream.copy_rows(block.all(), other.all(), shape)),
                ("to the device", stream.copy_rows(block.all(), pinned.all(), shape)),
                ("to the host", stream.copy_rows(pinned.all(), other.all(), shape)),
            ];
            for (way, refused) in copies {
                check_error!(refused, InvalidArgument, "a copy {way} of {shape:?}");
            }
        }
        stream.synchronize()?;
        check!(
            block.read()? == [1; BYTES] && other.read()? == [2; BYTES] && pinned.read()? == [3; BYTES],
            "a refused copy changed something"
        );
        stream.copy_rows(block.all(), pinned.all(), CopyShape::new(16, BYTES / 16))?;
        stream.synchronize()?;
        check!(block.read()? == [3; BYTES], "a stream does not copy rows after refused calls");
        Ok(())
    })
}

fn pitches_between_devices_are_checked(backend: &dyn Backend) -> CaseResult {
    let (near, far) = (Block::filled_on(backend, 0, BYTES, 1)?, Block::filled_on(backend, 1, BYTES, 2)?);
    for on in [0, 1] {
        let stream = Stream::on(backend, on)?;
        for shape in NARROW {
            let refused = stream.copy_rows(near.all(), far.all(), shape);
            check_error!(refused, InvalidArgument, "a copy between devices of {shape:?} on a stream of device {on}");
        }
        stream.synchronize()?;
    }
    check!(near.read()? == [1; BYTES] && far.read()? == [2; BYTES], "a refused copy between devices changed something");
    Ok(())
}

/// Returns what `dst` holds after a copy of rows from `src`.
fn copied(dst: &[u8], src: &[u8], shape: CopyShape) -> Vec<u8> {
    let mut bytes = dst.to_vec();
    for (to, from) in shape.rows() {
        bytes[to..to + shape.width].copy_from_slice(&src[from..from + shape.width]);
    }
    bytes
}

/// Columns of one matrix to others of it: the ranges overlap, and no row overlaps another.
fn columns_of_one_block_are_exact(backend: &dyn Backend) -> CaseResult {
    const PITCH: usize = 96;
    const ROWS: usize = 37;
    on_devices(backend, |device| {
        let stream = Stream::on(backend, device)?;
        for (width, from, to) in [(32, 0, 64), (32, 64, 0), (31, 1, 33), (48, 48, 0), (1, 95, 94)] {
            let content = Random::new(width as u64).bytes(PITCH * ROWS);
            let block = Block::on(backend, device, content.len())?;
            block.write(0, &content)?;
            let shape = CopyShape::new(width, ROWS).with_src_pitch(PITCH).with_dst_pitch(PITCH);
            let columns = |start: usize| block.span(start..content.len() - (PITCH - width - start));
            stream.copy_rows(columns(to), columns(from), shape)?;
            stream.synchronize()?;
            let mut expected = content.clone();
            let moved = copied(&content[to..], &content[from..], shape);
            expected[to..].copy_from_slice(&moved);
            check!(block.read()? == expected, "columns {from} of {width} bytes were copied wrongly to columns {to}");
        }
        Ok(())
    })
}

/// Copies rows of two thirds of their pitch out of a block and into it, and checks all bytes.
fn there_and_back(stream: &Stream<'_>, block: &Block<'_>, pinned: &Pinned<'_>, pitch: usize, what: &str) -> CaseResult {
    let bytes = block.bytes().min(pinned.read()?.len());
    let shape = CopyShape::new(pitch * 2 / 3, bytes / pitch).with_src_pitch(pitch).with_dst_pitch(pitch);
    let (old, new) = (Random::new(pitch as u64).bytes(bytes), Random::new(1).bytes(bytes));
    block.write(0, &old)?;
    pinned.write(&new)?;
    stream.copy_rows(block.span(0..bytes), pinned.all(), shape)?;
    stream.synchronize()?;
    let arrived = copied(&old, &new, shape);
    check!(block.read()?[..bytes] == arrived, "rows with a pitch of {pitch} bytes did not arrive in {what}");
    pinned.write(&old)?;
    stream.copy_rows(pinned.all(), block.span(0..bytes), shape)?;
    stream.synchronize()?;
    check!(
        pinned.read()?[..bytes] == copied(&old, &arrived, shape),
        "rows with a pitch of {pitch} bytes came back from {what} changed"
    );
    Ok(())
}

fn in_memory_of_each_kind_are_exact(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let can = backend.capabilities(device)?;
        let stream = Stream::on(backend, device)?;
        let piece = if can.mapped_memory { can.mapped_memory_granularity } else { 4096 };
        let pinned = Pinned::new(backend, 4096)?;
        for Maker { what, make, .. } in makers(backend, &stream)? {
            let block = make(piece)?;
            for pitch in [3, 100, 256, 1000] {
                there_and_back(&stream, &block, &pinned, pitch, &what)?;
            }
        }
        Ok(())
    })
}

/// Rows of a block that consists of several mappings. Some lie in two of them.
fn across_mappings_are_exact(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let piece = backend.capabilities(device)?.mapped_memory_granularity;
        let stream = Stream::on(backend, device)?;
        let block = Block::mapped(backend, device, &[piece; 3])?;
        let pinned = Pinned::new(backend, 3 * piece)?;
        for pitch in [piece / 2 + 100, piece, piece + 64] {
            there_and_back(&stream, &block, &pinned, pitch, "several mappings")?;
        }
        Ok(())
    })
}

/// More rows than a grid has blocks in its second dimension, in each direction.
fn of_many_rows_are_exact(backend: &dyn Backend) -> CaseResult {
    const ROWS: usize = 65_539;
    on_devices(backend, |device| {
        let (dense, sparse) = (CopyShape::new(1, ROWS), CopyShape::new(1, ROWS).with_src_pitch(2).with_dst_pitch(2));
        let content = Random::new(6).bytes(2 * ROWS);
        let stream = Stream::on(backend, device)?;
        let source = Block::on(backend, device, 2 * ROWS)?;
        source.write(0, &content)?;
        let (pinned, target) = (Pinned::new(backend, 2 * ROWS)?, Block::on(backend, device, 2 * ROWS)?);
        let proves = |what: &str, got: &[u8], shape: CopyShape| -> CaseResult {
            let expected = copied(&vec![0; 2 * ROWS], &content, shape);
            let wrong = got.iter().zip(&expected).position(|(got, expected)| got != expected);
            check!(wrong.is_none(), "a copy {what} of {shape:?} gave a wrong byte at {wrong:?}");
            Ok(())
        };
        let gathered = dense.with_src_pitch(2);
        pinned.write(&vec![0; 2 * ROWS])?;
        stream.set(target.all(), 0)?;
        stream.copy_rows(target.all(), source.all(), sparse)?;
        stream.copy_rows(pinned.all(), source.all(), gathered)?;
        stream.synchronize()?;
        proves("on the device", &target.read()?, sparse)?;
        proves("to the host", &pinned.read()?, gathered)?;
        pinned.write(&content)?;
        stream.set(target.all(), 0)?;
        stream.copy_rows(target.all(), pinned.all(), sparse)?;
        stream.synchronize()?;
        proves("to the device", &target.read()?, sparse)?;
        let other = (device + 1) % backend.device_count();
        if other != device && backend.capabilities(device)?.peer_copy {
            let there = Block::filled_on(backend, other, 2 * ROWS, 0)?;
            stream.copy_rows(there.all(), source.all(), sparse)?;
            stream.synchronize()?;
            proves("to another device", &there.read()?, sparse)?;
            there.write(0, &content)?;
            stream.set(target.all(), 0)?;
            stream.copy_rows(target.all(), there.all(), gathered)?;
            stream.synchronize()?;
            proves("from another device", &target.read()?, gathered)?;
        }
        Ok(())
    })
}

/// Pitches beyond the numbers of vendors. With one row, no byte is that far away.
fn pitches_may_be_large(backend: &dyn Backend) -> CaseResult {
    on_devices(backend, |device| {
        let stream = Stream::on(backend, device)?;
        let (block, other) =
            (Block::filled_on(backend, device, BYTES, 1)?, Block::filled_on(backend, device, BYTES, 2)?);
        let pinned = Pinned::holding(backend, &[3; BYTES])?;
        for pitch in [1 << 31, (1 << 32) + 8, 1 << 40] {
            for shape in [CopyShape::new(16, 1).with_src_pitch(pitch), CopyShape::new(16, 1).with_dst_pitch(pitch)] {
                stream.copy_rows(block.span(0..16), other.span(0..16), shape)?;
                stream.copy_rows(block.span(16..32), pinned.span(0..16), shape)?;
                stream.copy_rows(pinned.span(16..32), other.span(0..16), shape)?;
                stream.synchronize()?;
                let (got, host) = (block.read()?, pinned.read()?);
                let expected: Vec<u8> = [[2; 16], [3; 16], [1; 16]].concat();
                check!(
                    got[..48] == expected && host[16..48] == [[2; 16], [3; 16]].concat(),
                    "{shape:?} gave other bytes"
                );
                stream.set(block.all(), 1)?;
                stream.synchronize()?;
                pinned.write(&[3; BYTES])?;
            }
        }
        Ok(())
    })
}

/// The shape of rows that lie 1 GiB apart, over more than 4 GiB. Only the rows are touched.
const LARGE_WIDTH: usize = 64;
const LARGE_PITCH: usize = 1 << 30;
const LARGE_ROWS: usize = 6;
const LARGE: usize = (LARGE_ROWS - 1) * LARGE_PITCH + LARGE_WIDTH;

/// Returns the shapes of copies that spread the rows and that gather them.
fn large_shapes() -> (CopyShape, CopyShape) {
    let shape = CopyShape::new(LARGE_WIDTH, LARGE_ROWS);
    (shape.with_dst_pitch(LARGE_PITCH), shape.with_src_pitch(LARGE_PITCH))
}

fn large_row<'s>(large: &'s Block<'_>, row: usize) -> Span<'s> {
    large.span(row * LARGE_PITCH..row * LARGE_PITCH + LARGE_WIDTH)
}

/// Spreads rows over more than 4 GiB of a device, from another one, and gathers them there again, on streams of both.
fn between_devices_of_more_than_four_gibibytes_are_exact(backend: &dyn Backend) -> CaseResult {
    const OTHER: u32 = 1 - DEVICE;
    let (spread, gathered) = large_shapes();
    needs_free(backend, DEVICE, LARGE + (1 << 20))?;
    let large = Block::new(backend, LARGE)?;
    let packed = Block::on(backend, OTHER, LARGE_WIDTH * LARGE_ROWS)?;
    for on in [DEVICE, OTHER] {
        let (stream, own) = (Stream::on(backend, on)?, Stream::new(backend)?);
        let row = |row: usize| large_row(&large, row);
        (0..LARGE_ROWS).try_for_each(|index| own.set(row(index), 0))?;
        own.synchronize()?;
        let content = Random::new(u64::from(on) + 4).bytes(LARGE_WIDTH * LARGE_ROWS);
        packed.write(0, &content)?;
        stream.copy_rows(large.all(), packed.all(), spread)?;
        stream.synchronize()?;
        for (index, expected) in content.chunks(LARGE_WIDTH).enumerate() {
            let got = read_span(backend, DEVICE, row(index))?;
            check!(got == expected, "a copy of {spread:?} from another device gave row {index} other bytes");
        }
        packed.write(0, &vec![0; content.len()])?;
        stream.copy_rows(packed.all(), large.all(), gathered)?;
        stream.synchronize()?;
        check!(packed.read()? == content, "a copy of {gathered:?} to another device gave other bytes");
    }
    Ok(())
}

/// Spreads rows over more than 4 GiB of a device, from it and from the host, and gathers them on both.
fn of_more_than_four_gibibytes_are_exact(backend: &dyn Backend) -> CaseResult {
    needs_free(backend, DEVICE, LARGE + (1 << 20))?;
    let stream = Stream::new(backend)?;
    let content = Random::new(3).bytes(LARGE_WIDTH * LARGE_ROWS);
    let (spread, gathered) = large_shapes();
    let (large, packed) = (Block::new(backend, LARGE)?, Block::holding(backend, &content)?);
    let pinned = Pinned::holding(backend, &content)?;
    let spread_from = [("on the device", packed.all()), ("to the device", pinned.all())];
    for (way, from) in spread_from {
        for row in 0..LARGE_ROWS {
            stream.set(large_row(&large, row), 0)?;
        }
        stream.copy_rows(large.all(), from, spread)?;
        stream.synchronize()?;
        for row in 0..LARGE_ROWS {
            let got = read_span(backend, DEVICE, large_row(&large, row))?;
            check!(
                got == content[row * LARGE_WIDTH..][..LARGE_WIDTH],
                "a copy of {spread:?} {way} gave row {row} other bytes"
            );
        }
    }
    stream.set(packed.all(), 0)?;
    stream.copy_rows(packed.all(), large.all(), gathered)?;
    stream.synchronize()?;
    check!(packed.read()? == content, "a copy of {gathered:?} on the device gave other bytes");
    pinned.write(&[0; LARGE_WIDTH * LARGE_ROWS])?;
    stream.copy_rows(pinned.all(), large.all(), gathered)?;
    stream.synchronize()?;
    check!(pinned.read()? == content, "a copy of {gathered:?} to the host gave other bytes");
    Ok(())
}

/// Spreads bytes over rows with gaps and gathers them again, on every kind of stream. Each copy needs the one before it.
fn run_in_order_on_each_kind_of_stream(backend: &dyn Backend) -> CaseResult {
    const WIDTH: usize = 24;
    const PITCH: usize = 64;
    const ROWS: usize = BYTES / PITCH;
    on_devices(backend, |device| {
        let spread = CopyShape::new(WIDTH, ROWS).with_dst_pitch(PITCH);
        let gathered = CopyShape::new(WIDTH, ROWS).with_src_pitch(PITCH);
        let content = Random::new(2).bytes(WIDTH * ROWS);
        let blocks = |bytes| -> Result<Vec<Block<'_>>> {
            (0..2).map(|_| Block::filled_on(backend, device, bytes, 0x77)).collect()
        };
        for kind in StreamKind::of(backend, device)? {
            let made = kind.make(backend, device)?;
            let stream = &made.stream;
            let (dense, sparse) = (blocks(content.len())?, blocks(BYTES)?);
            let (source, target) = (Pinned::holding(backend, &content)?, Pinned::new(backend, content.len())?);
            stream.copy_rows(sparse[0].all(), source.all(), spread)?;
            for step in 0..30 {
                let (this, next) = (step % 2, (step + 1) % 2);
                stream.copy_rows(dense[this].all(), sparse[this].all(), gathered)?;
                stream.copy_rows(sparse[next].all(), dense[this].all(), spread)?;
                stream.set(dense[this].all(), 0)?;
                stream.set(sparse[this].all(), 0x77)?;
            }
            stream.copy_rows(target.all(), sparse[0].all(), gathered)?;
            stream.synchronize()?;
            check!(
                target.read()? == content,
                "a chain of 62 copies of rows ended with other bytes on a {kind:?} stream"
            );
            let expected = copied(&[0x77; BYTES], &content, spread);
            check!(sparse[0].read()? == expected, "rows wrote between each other on a {kind:?} stream");
        }
        Ok(())
    })
}

fn run_after_pending_work(backend: &dyn Backend) -> CaseResult {
    const SHAPE: CopyShape = CopyShape::new(8, BYTES / 16).with_src_pitch(16).with_dst_pitch(16);
    on_devices(backend, |device| {
        let busy = StreamLoad::new(backend, device, Direction::ToHost)?;
        let first = |span: &[u8]| span.iter().step_by(16).copied().collect::<Vec<_>>();
        until_conclusive("a copy of rows waits for the work before it", |load| {
            let on = |byte| Block::filled_on(backend, device, BYTES, byte);
            let (block, earlier, later) = (on(0)?, on(8)?, on(8)?);
            let (new, seen) = (Pinned::holding(backend, &[1; BYTES])?, Pinned::holding(backend, &[9; BYTES])?);
            let stream = Stream::on(backend, device)?;
            busy.enqueue(&stream, load)?;
            let rows = |dst: Span<'_>, src: Span<'_>| stream.copy_rows(dst, src, SHAPE);
            rows(seen.all(), block.all())?;
            rows(earlier.all(), block.all())?;
            rows(block.all(), new.all())?;
            rows(later.all(), block.all())?;
            let pending = stream.is_pending()?;
            stream.synchronize()?;
            let none = vec![0; BYTES / 16];
            check!(first(&seen.read()?) == none, "rows to the device overtook rows to the host before them");
            check!(first(&earlier.read()?) == none, "rows on the device were overtaken by rows to their source");
            check!(first(&block.read()?) == vec![1; BYTES / 16], "rows to the device did not arrive");
            check!(
                first(&later.read()?) == vec![1; BYTES / 16],
                "rows on the device overtook the copy of their source"
            );
            Ok(Attempt::seen(pending))
        })
    })
}
