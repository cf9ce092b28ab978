//! Two-dimensional copies.

use highwater_hal::{CopyShape, ErrorKind, Location, MemoryCopy, MemoryCopy2d};

use super::super::hooks::Hooks;
use super::super::reference::{Reference, Way, forgiven, wrong};

mutants! {
    in "copy-2d.exact":
    "rows-read-without-gaps": "Takes the source's rows as adjacent." => |h| reshaped(h, |shape| shape.src_pitch = shape.width);
    "rows-written-without-gaps": "Writes the rows adjacent." => |h| reshaped(h, |shape| shape.dst_pitch = shape.width);
    "pitches-exchanged": "Exchanges the pitches where both blocks have room." => |h| h.backend.copy_2d(|reference, copy, stream| {
        let shape = copy.shape.with_src_pitch(copy.shape.dst_pitch).with_dst_pitch(copy.shape.src_pitch);
        let exchanged = MemoryCopy2d::new(copy.dst, copy.src, shape);
        reference.copy_2d(&exchanged, stream).or_else(|_| reference.copy_2d(copy, stream))
    });
    "last-row-left-out": "Leaves out the last of several rows." =>
        |h| reshaped(h, |shape| shape.height -= usize::from(shape.height > 1));
    "rows-short": "Leaves out the last byte of each row." => |h| reshaped(h, |shape| shape.width -= usize::from(shape.width > 1));
    "rows-with-their-gaps": "Copies the gaps, too, if the pitches are equal." => |h| h.backend.copy_2d(|reference, copy, stream| {
        let &MemoryCopy2d { dst, src, shape, .. } = copy;
        match shape.src_bytes() {
            Some(bytes) if shape.src_pitch == shape.dst_pitch && shape.check("copy_2d").is_ok() => {
                let whole = MemoryCopy::new(dst, src, bytes);
                // The ranges of columns of one matrix overlap, and a flat copy of them is refused.
                reference.copy(&whole, stream).or_else(|_| reference.copy_2d(copy, stream))
            }
            _ => reference.copy_2d(copy, stream),
        }
    });
    "rows-of-eight-bits": "Keeps the low 8 bits of the height." => |h| reshaped(h, |shape| shape.height &= 0xff);
    "rows-beyond-a-grid-left-out": "Leaves out the rows from 65,535 on." =>
        |h| reshaped(h, |shape| shape.height = shape.height.min(0xffff));
    "rows-with-offsets-of-32-bits" [by_a_large_block]: "Keeps the low 32 bits of the offset of a row in the source." => |h| h.backend.copy_2d(|reference, copy, stream| {
        const LIMIT: usize = 1 << 32;
        let &MemoryCopy2d { dst, src, shape, .. } = copy;
        reference.copy_2d(copy, stream)?;
        match shape.src_bytes() {
            Some(bytes) if bytes > LIMIT && shape.src_pitch > 0 && LIMIT.is_multiple_of(shape.src_pitch) => {
                // The rows beyond it begin again at the first.
                let within = LIMIT / shape.src_pitch;
                let mut beyond = shape;
                beyond.height -= within;
                reference.copy_2d(&MemoryCopy2d::new(dst.offset(within * shape.dst_pitch), src, beyond), stream)
            }
            _ => Ok(()),
        }
    });
    "rows-between-devices-with-offsets-of-32-bits" [by_a_large_block] needs [TWO_DEVICES, has::peer_copy]:
        "Keeps the low 32 bits of the offset of a row in the destination on another device." =>
        |h| h.backend.copy_2d(|reference, copy, stream| {
            const LIMIT: usize = 1 << 32;
            let &MemoryCopy2d { dst, src, shape, .. } = copy;
            let is_far = Way::between(dst, src) == Way::BetweenDevices && shape.check("copy_2d").is_ok();
            match shape.dst_bytes() {
                Some(bytes) if is_far && bytes > LIMIT => shape.rows().try_for_each(|(to, from)| {
                    let row = MemoryCopy::new(dst.offset(to % LIMIT), src.offset(from), shape.width);
                    reference.copy(&row, stream)
                }),
                _ => reference.copy_2d(copy, stream),
            }
        });
    "rows-clear-their-source": "Clears the first row of a source on the device." => |h| h.backend.copy_2d(|reference, copy, stream| {
        reference.copy_2d(copy, stream)?;
        match copy.src {
            Location::Device { device, ptr } if device == stream.device() && copy.shape.height > 0 => {
                reference.overwrite(device, ptr, copy.shape.width, stream);
            }
            _ => {}
        }
        Ok(())
    });

    in "copy-2d.ordered":
    "rows-to-the-device-overtake": "Copies rows to the device ahead of the stream's earlier work." =>
        |h| overtake(h, Way::ToDevice);
    "rows-to-the-host-overtake": "Copies rows to the host ahead of the stream's earlier work." => |h| overtake(h, Way::ToHost);
    "rows-on-the-device-overtake": "Copies rows within a device ahead of the stream's earlier work." =>
        |h| overtake(h, Way::OnDevice);

    in "copy-2d.zero":
    "no-rows-refused": "Refuses to copy 0 rows." => |h| refuse(h, |copy| copy.shape.height == 0);
    "empty-rows-refused": "Refuses to copy rows of 0 bytes." => |h| refuse(h, |copy| copy.shape.width == 0);
    "no-rows-between-devices-refused" needs [TWO_DEVICES, has::peer_copy]: "Refuses to copy 0 rows between devices." =>
        |h| refuse(h, |copy| copy.shape.height == 0 && Way::between(copy.dst, copy.src) == Way::BetweenDevices);
    "no-rows-done": "Copies a row instead of none." => |h| at_least(h, |shape| shape.height = shape.height.max(1));
    "empty-rows-done": "Copies a byte of each row instead of none." => |h| at_least(h, |shape| {
        shape.width = shape.width.max(1);
        (shape.src_pitch, shape.dst_pitch) = (shape.src_pitch.max(1), shape.dst_pitch.max(1));
    });

    in "copy-2d.pitch":
    "narrow-rows-accepted": "Accepts a pitch below the width, and copies nothing." => |h| h.backend.copy_2d(|reference, copy, stream| {
        forgiven(ErrorKind::InvalidArgument, reference.copy_2d(copy, stream), ())
    });
    "narrow-source-widened": "Widens a pitch of the source that is too small." =>
        |h| reshaped(h, |shape| shape.src_pitch = shape.src_pitch.max(shape.width));
    "narrow-destination-widened": "Widens a pitch of the destination that is too small." =>
        |h| reshaped(h, |shape| shape.dst_pitch = shape.dst_pitch.max(shape.width));
    "narrow-rows-begun": "Copies the first row before it refuses the pitch." => |h| h.backend.copy_2d(|reference, copy, stream| {
        if copy.shape.check("copy_2d").is_err() {
            let first = MemoryCopy2d::new(copy.dst, copy.src, CopyShape::new(copy.shape.width, 1));
            reference.copy_2d(&first, stream)?;
        }
        reference.copy_2d(copy, stream)
    });
    "large-pitches-refused": "Refuses a pitch that a number of 32 bits with a sign does not hold." =>
        |h| refuse(h, |copy| copy.shape.src_pitch.max(copy.shape.dst_pitch) > i32::MAX as usize);
    "pitch-of-one-row-ignored": "Ignores the pitches of a single row." => |h| reshaped(h, |shape| {
        if shape.height == 1 {
            (shape.src_pitch, shape.dst_pitch) = (shape.width, shape.width);
        }
    });
}

/// Changes the shape of each copy.
fn reshaped(h: &mut Hooks, change: fn(&mut CopyShape)) {
    h.backend.copy_2d(move |reference, copy, stream| {
        let mut copy = *copy;
        change(&mut copy.shape);
        reference.copy_2d(&copy, stream)
    });
}

/// Copies more, where the blocks have room for it.
fn at_least(h: &mut Hooks, change: fn(&mut CopyShape)) {
    h.backend.copy_2d(move |reference, copy, stream| {
        let mut more = *copy;
        change(&mut more.shape);
        reference.copy_2d(&more, stream).or_else(|_| reference.copy_2d(copy, stream))
    });
}

fn refuse(h: &mut Hooks, is_refused: fn(&MemoryCopy2d) -> bool) {
    h.backend.copy_2d(move |reference, copy, stream| match is_refused(copy) {
        true => Err(wrong(ErrorKind::InvalidArgument, "copy_2d")),
        false => reference.copy_2d(copy, stream),
    });
}

/// Copies one way at once where the stream is busy.
fn overtake(h: &mut Hooks, way: Way) {
    h.backend.copy_2d(move |reference: &Reference, copy, stream| {
        match Way::between(copy.dst, copy.src) == way && reference.is_pending(stream) {
            true => reference.on_own_stream(stream.device(), |own| reference.copy_2d(copy, own)),
            false => reference.copy_2d(copy, stream),
        }
    });
}
