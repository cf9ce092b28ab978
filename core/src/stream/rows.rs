//! Two-dimensional copies: rows at equal distances.

use std::ops::Range;

use super::Stream;
use super::copies::{CopyKind, Part};
use crate::buffer::DeviceSlice;
use crate::pinned::{PinnedSlice, PinnedSliceMut};
use highwater_hal::{CopyShape, Element, Error, ErrorKind, HostPtr, Result, counted};

impl Stream {
    /// Enqueues a two-dimensional copy between device buffers, as `cudaMemcpy2DAsync` does. Row `r` begins `r` pitches behind the start
    /// of its slice. Width and pitches are bytes, whatever the type of the values. Bytes between the rows keep their value on both
    /// sides. At least one of the buffers must be on this stream's device.
    ///
    /// ```
    /// use highwater_core::CopyShape;
    /// # use highwater_core::Runtime;
    /// # use highwater_mock::{MockGpu, MockOptions};
    /// # let runtime = Runtime::new(MockGpu::open(MockOptions::new())?)?;
    /// # let stream = runtime.device(0)?.create_stream()?;
    ///
    /// // The first 2 of the 4 columns of a row-major matrix of 3 rows, into a matrix of their own.
    /// let matrix = stream.upload(&[0.0_f32, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0, 20.0, 21.0, 22.0, 23.0])?;
    /// let columns = stream.upload(&[0.0_f32; 6])?;
    /// let shape = CopyShape::new(2 * size_of::<f32>(), 3).with_src_pitch(4 * size_of::<f32>());
    /// stream.copy_2d(&matrix, &columns, shape)?;
    /// assert_eq!(stream.download(&columns)?, [0.0, 1.0, 10.0, 11.0, 20.0, 21.0]);
    /// # Ok::<(), highwater_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// `InvalidArgument` if a pitch is less than the width, if the rows leave a slice, or if a row of one side overlaps a row of the
    /// other. Otherwise as [`Stream::copy`].
    pub fn copy_2d<'s, 'd, T: Element>(
        &self,
        src: impl Into<DeviceSlice<'s, T>>,
        dst: impl Into<DeviceSlice<'d, T>>,
        shape: CopyShape,
    ) -> Result<()> {
        const OPERATION: &str = "copy_2d";
        let (src, dst) = (src.into(), dst.into());
        self.copy_on_devices(OPERATION, src, dst, |_| {
            check_rows(OPERATION, shape, src.bytes(), dst.bytes()).map(|()| shape)
        })
    }

    /// As [`Stream::copy_2d`], from page-locked memory to the device. Returns at once; the buffer tracks its use. The copy is split at
    /// the borders of [registrations](crate::PinnedBuffer::registrations).
    ///
    /// # Errors
    /// `InvalidArgument` as [`Stream::copy_2d`]. Otherwise as [`Stream::copy_to_device`].
    pub fn copy_2d_to_device<'h, 'd, T: Element>(
        &self,
        src: impl Into<PinnedSlice<'h, T>>,
        dst: impl Into<DeviceSlice<'d, T>>,
        shape: CopyShape,
    ) -> Result<()> {
        self.copy_rows("copy_2d_to_device", &src.into(), dst.into(), shape, CopyKind::ToDevice)
    }

    /// As [`Stream::copy_2d`], from the device to page-locked memory. Returns at once; the buffer tracks its use, and
    /// [`PinnedBuffer::read`](crate::PinnedBuffer::read) waits for the values.
    ///
    /// # Errors
    /// As [`Stream::copy_2d_to_device`].
    pub fn copy_2d_to_host<'d, 'h, T: Element>(
        &self,
        src: impl Into<DeviceSlice<'d, T>>,
        dst: impl Into<PinnedSliceMut<'h, T>>,
        shape: CopyShape,
    ) -> Result<()> {
        self.copy_rows("copy_2d_to_host", &dst.into().0, src.into(), shape, CopyKind::ToHost)
    }

    /// As [`Stream::copy_2d_to_device`], from an address in page-locked memory of this runtime instead of a buffer. See
    /// [`Stream::copy_from_raw`].
    ///
    /// # Errors
    /// `InvalidArgument` as [`Stream::copy_2d`]. Otherwise as [`Stream::copy_from_raw`].
    ///
    /// # Safety
    /// The caller must ensure that no code of the CPU writes these rows until the stream has executed the copy. Slices of
    /// [`PinnedBuffer::write`](crate::PinnedBuffer::write) that exist already do not wait for it.
    pub unsafe fn copy_2d_from_raw<'d, T: Element>(
        &self,
        src: HostPtr,
        dst: impl Into<DeviceSlice<'d, T>>,
        shape: CopyShape,
    ) -> Result<()> {
        self.copy_rows_at("copy_2d_from_raw", src, dst.into(), shape, CopyKind::ToDevice)
    }

    /// As [`Stream::copy_2d_to_host`], to an address in page-locked memory of this runtime instead of a buffer. See
    /// [`Stream::copy_to_raw`].
    ///
    /// # Errors
    /// As [`Stream::copy_2d_from_raw`].
    ///
    /// # Safety
    /// The caller must ensure that no code of the CPU accesses these rows until the stream has executed the copy. This process must have
    /// the right to write them. Slices that exist already do not wait for the copy.
    pub unsafe fn copy_2d_to_raw<'d, T: Element>(
        &self,
        src: impl Into<DeviceSlice<'d, T>>,
        dst: HostPtr,
        shape: CopyShape,
    ) -> Result<()> {
        self.copy_rows_at("copy_2d_to_raw", dst, src.into(), shape, CopyKind::ToHost)
    }

    fn copy_rows<T: Element>(
        &self,
        operation: &'static str,
        host: &PinnedSlice<'_, T>,
        device: DeviceSlice<'_, T>,
        shape: CopyShape,
        kind: CopyKind,
    ) -> Result<()> {
        self.check_pinned(operation, host, &device.untyped())?;
        let (block, range) = (host.block(), host.bytes());
        let (src, dst) = in_order(kind, range.len(), device.bytes());
        check_rows(operation, shape, src, dst)?;
        let parts = split(range.start, kind, shape, |range| block.cut(range));
        self.copy_block(operation, block, parts.into_iter(), device, kind)
    }

    fn copy_rows_at<T: Element>(
        &self,
        operation: &'static str,
        host: HostPtr,
        device: DeviceSlice<'_, T>,
        shape: CopyShape,
        kind: CopyKind,
    ) -> Result<()> {
        let on_host = if kind == CopyKind::ToDevice { shape.src_bytes() } else { shape.dst_bytes() };
        // The block of the address is not known yet.
        let (src, dst) = in_order(kind, on_host.unwrap_or(0), device.bytes());
        check_rows(operation, shape, src, dst)?;
        self.in_block_at(operation, host, on_host.unwrap_or(0), &device.untyped(), |block, range| {
            let parts = split(range.start, kind, shape, |range| block.cut(range));
            self.copy_block(operation, block, parts.into_iter(), device, kind)
        })
    }
}

/// Returns the values of the source and of the destination.
fn in_order<T>(kind: CopyKind, host: T, device: T) -> (T, T) {
    if kind == CopyKind::ToDevice { (host, device) } else { (device, host) }
}

/// Checks that the rows do not overlap each other, and that they lie inside slices of so many bytes.
fn check_rows(operation: &'static str, shape: CopyShape, src: usize, dst: usize) -> Result<()> {
    shape.check(operation)?;
    for (side, needed, bytes) in [("source", shape.src_bytes(), src), ("destination", shape.dst_bytes(), dst)] {
        if needed.is_none_or(|needed| needed > bytes) {
            let pitch = if side == "source" { shape.src_pitch } else { shape.dst_pitch };
            let [width, pitch, bytes] = [shape.width, pitch, bytes].map(|bytes| counted(bytes, "byte"));
            let rows = counted(shape.height, "row");
            let message =
                format!("the copy of {rows} of {width} with a pitch of {pitch} leaves the {side}, which has {bytes}");
            return Err(Error::new(ErrorKind::InvalidArgument, operation, message)
                .with_hint("pass a slice that ends with the last row or behind it; width and pitches are bytes"));
        }
    }
    Ok(())
}

/// Splits a copy of rows at the borders between registrations. Rows that lie in one are one part; a row that lies in several is cut.
/// `start` is the offset of the first row in the block, and `cut` splits a range of the block.
fn split<I: Iterator<Item = Range<usize>>>(
    start: usize,
    kind: CopyKind,
    shape: CopyShape,
    cut: impl Fn(Range<usize>) -> I,
) -> Vec<Part> {
    let (host_pitch, device_pitch, extent) = match kind {
        CopyKind::ToDevice => (shape.src_pitch, shape.dst_pitch, shape.src_bytes()),
        _ => (shape.dst_pitch, shape.src_pitch, shape.dst_bytes()),
    };
    if shape.is_empty() {
        return vec![Part { host: start, device: 0, shape }];
    }
    let (mut parts, mut row) = (Vec::new(), 0);
    for registered in cut(start..start + extent.unwrap_or(0)) {
        // The rows that end in this registration.
        let room = registered.end.saturating_sub(start).checked_sub(shape.width);
        let end = room.map_or(0, |room| room / host_pitch + 1).min(shape.height);
        if end > row {
            let mut rows = shape;
            rows.height = end - row;
            parts.push(Part { host: start + row * host_pitch, device: row * device_pitch, shape: rows });
            row = end;
        }
        let begin = start + row * host_pitch;
        if row < shape.height && begin < registered.end {
            parts.extend(cut(begin..begin + shape.width).map(|piece| Part {
                host: piece.start,
                device: row * device_pitch + piece.start - begin,
                shape: CopyShape::new(piece.len(), 1),
            }));
            row += 1;
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Splits a range at borders.
    fn cut_at(borders: &[usize], range: Range<usize>) -> Vec<Range<usize>> {
        let inside = borders.iter().copied().filter(|border| range.contains(border) && *border > range.start);
        let ends: Vec<usize> = inside.chain([range.end]).collect();
        let starts = std::iter::once(range.start).chain(ends.iter().copied());
        starts.zip(ends.iter().copied()).map(|(start, end)| start..end).collect()
    }

    proptest! {
        /// Each byte of each row is copied once, no other byte is, and no part crosses a border.
        #[test]
        fn parts_are_the_rows_and_cross_no_border(
            start in 0_usize..50,
            (width, height) in (0_usize..40, 0_usize..9),
            gaps in (0_usize..30, 0_usize..30),
            mut borders in proptest::collection::vec(1_usize..400, 0..12),
            to_device: bool,
        ) {
            borders.sort_unstable();
            borders.dedup();
            let shape = CopyShape::new(width, height).with_src_pitch(width + gaps.0).with_dst_pitch(width + gaps.1);
            let kind = if to_device { CopyKind::ToDevice } else { CopyKind::ToHost };
            let parts = split(start, kind, shape, |range| cut_at(&borders, range).into_iter());
            let host_offset = |(to, from)| if to_device { (from, to) } else { (to, from) };
            let bytes = |host: usize, device: usize, shape: CopyShape| {
                shape.rows().map(host_offset).flat_map(move |(on_host, on_device)| {
                    (0..shape.width).map(move |byte| (host + on_host + byte, device + on_device + byte))
                }).collect::<Vec<_>>()
            };
            let copied: Vec<_> = parts.iter().flat_map(|part| bytes(part.host, part.device, part.shape)).collect();
            prop_assert_eq!(copied, bytes(start, 0, shape));
            for part in parts {
                let extent = if to_device { part.shape.src_bytes() } else { part.shape.dst_bytes() };
                let range = part.host..part.host + extent.unwrap();
                prop_assert!(cut_at(&borders, range.clone()).len() == 1, "{range:?} crosses a border of {borders:?}");
            }
        }
    }
}
