//! Which memory a command reads and writes, for test mode and for the race finder.

use std::fmt;
use std::sync::Arc;

use highwater_hal::{DevicePtr, Transpose};

use crate::engine::Engine;
use crate::kernel::{Factor, Panel, Product, intermediate_bytes};
use crate::stream::Command;

/// Whose addresses a range is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    Host,
    Device(u32),
}

/// A range of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) space: Space,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

impl Range {
    pub(crate) fn meets(&self, other: &Self) -> bool {
        self.space == other.space
            && self.address < other.address.saturating_add(other.bytes)
            && other.address < self.address.saturating_add(self.bytes)
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { space, address, bytes } = *self;
        match space {
            Space::Host => write!(f, "{bytes} bytes of page-locked memory at {address:#x}"),
            Space::Device(device) => write!(f, "{bytes} bytes at {:?} of device {device}", DevicePtr::new(address)),
        }
    }
}

/// Which bytes of a range are meant: columns of equal length at equal distances, in parts at equal distances. Tiles of one
/// matrix lie between each other without sharing a byte.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    column: u64,
    columns: u64,
    column_step: u64,
    parts: u64,
    part_step: u64,
}

impl Layout {
    /// All of so many bytes.
    pub(crate) const fn whole(bytes: u64) -> Self {
        Self { column: bytes, columns: 1, column_step: bytes, parts: 1, part_step: bytes }
    }

    /// Column-major matrices of so many rows and columns; the distances of columns and of matrices in elements.
    fn matrices(rows: usize, columns: (usize, usize), parts: (usize, usize), size: usize) -> Self {
        let bytes = |elements: usize| (elements * size) as u64;
        let ((columns, ld), (parts, stride)) = (columns, parts);
        let mut layout = Self {
            column: bytes(rows),
            columns: columns as u64,
            column_step: bytes(ld),
            parts: if stride == 0 { parts.min(1) } else { parts } as u64,
            part_step: bytes(stride),
        };
        if layout.columns == 1 || layout.column_step == layout.column {
            layout.column *= layout.columns;
            (layout.columns, layout.column_step) = (1, layout.column);
        }
        if layout.columns == 1 && layout.part_step == layout.column {
            layout.column *= layout.parts;
            (layout.parts, layout.part_step) = (1, layout.column);
        }
        layout
    }

    /// Bytes from the first to behind the last one.
    fn extent(&self) -> u64 {
        if self.column == 0 || self.columns == 0 || self.parts == 0 {
            return 0;
        }
        (self.parts - 1) * self.part_step + (self.columns - 1) * self.column_step + self.column
    }

    /// Offset and length of each piece without gaps.
    pub(crate) fn runs(self) -> impl Iterator<Item = (u64, u64)> {
        (0..self.parts).flat_map(move |part| {
            (0..self.columns).map(move |column| (part * self.part_step + column * self.column_step, self.column))
        })
    }
}

/// What memory is to a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Operand,
    /// Room for the intermediate results of the product with this mark.
    Workspace {
        product: usize,
        of_handle: bool,
    },
}

/// What one command does to one range.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Use {
    /// From the first to the last byte.
    pub(crate) range: Range,
    pub(crate) layout: Layout,
    pub(crate) writes: bool,
    pub(crate) role: Role,
}

impl Use {
    /// Whether the memory is the mock's own, which the last product that uses it gives back.
    pub(crate) fn is_of_handle(&self) -> bool {
        matches!(self.role, Role::Workspace { of_handle: true, .. })
    }
}

/// What a command reads and writes.
pub(crate) fn uses(command: &Command, engine: &Engine) -> Vec<Use> {
    let on = |device: u32, offset: usize, layout: Layout, writes: bool| {
        let address = engine.devices[device as usize].memory.base() + offset as u64;
        let range = Range { space: Space::Device(device), address, bytes: layout.extent() };
        Use { range, layout, writes, role: Role::Operand }
    };
    let whole = |device, offset, bytes: usize, writes| on(device, offset, Layout::whole(bytes as u64), writes);
    let host = |address: usize, bytes: usize, writes: bool| {
        let range = Range { space: Space::Host, address: address as u64, bytes: bytes as u64 };
        Use { range, layout: Layout::whole(range.bytes), writes, role: Role::Operand }
    };
    let mut uses = match *command {
        Command::CopyToDevice { src, dst, bytes, device } => {
            vec![host(src.address(), bytes, false), whole(device, dst, bytes, true)]
        }
        Command::CopyToHost { src, dst, bytes, device } => {
            vec![whole(device, src, bytes, false), host(dst.address(), bytes, true)]
        }
        Command::CopyOnDevices { src, src_device, dst, dst_device, bytes } => {
            vec![whole(src_device, src, bytes, false), whole(dst_device, dst, bytes, true)]
        }
        Command::Fill { device, dst, bytes, .. } => vec![whole(device, dst, bytes, true)],
        Command::Multiply(ref product, panel) => {
            let mut uses = factors(product, &on);
            uses.push(workspace(product, panel, true, &on));
            uses
        }
        Command::Finish(ref product, panel) => {
            let mut uses = results(product, panel, &on);
            uses.push(workspace(product, panel, false, &on));
            uses
        }
        Command::MultiplyAndFinish(ref product) => {
            let (rows, columns, batches) = (product.shape.m, product.shape.n, product.shape.batch_count());
            let mut uses = factors(product, &on);
            uses.extend(results(product, Panel { batch: 0, batches, row: 0, rows, column: 0, columns }, &on));
            uses
        }
        Command::Record(_) | Command::Wait(_) | Command::Release(_) => Vec::new(),
        // What it touches is not known here.
        #[cfg(feature = "simulated")]
        Command::Call(_) => Vec::new(),
        #[cfg(test)]
        Command::Panic => Vec::new(),
    };
    uses.retain(|used| used.range.bytes > 0);
    uses
}

type On<'a> = &'a dyn Fn(u32, usize, Layout, bool) -> Use;

fn factors(product: &Product, on: On<'_>) -> Vec<Use> {
    if product.ignores_factors() {
        return Vec::new();
    }
    let shape = &product.shape;
    let stored = |transpose, rows, columns| if transpose == Transpose::No { (rows, columns) } else { (columns, rows) };
    let (strides, size) = (product.strides(), shape.data_type.bytes());
    let read = |offset, (rows, columns), ld, stride| {
        let layout = Layout::matrices(rows, (columns, ld), (strides.count, stride), size);
        on(product.device, offset, layout, false)
    };
    vec![
        read(product.a, stored(shape.transpose_a, shape.m, shape.k), shape.lda, strides.stride_a),
        read(product.b, stored(shape.transpose_b, shape.k, shape.n), shape.ldb, strides.stride_b),
    ]
}

fn results(product: &Product, panel: Panel, on: On<'_>) -> Vec<Use> {
    let (shape, size) = (&product.shape, product.shape.output.bytes());
    let matrix = |first: usize, ld: usize, stride: usize, writes| {
        let offset = first + (panel.batch * stride + panel.column * ld + panel.row) * size;
        let layout = Layout::matrices(panel.rows, (panel.columns, ld), (panel.batches, stride), size);
        on(product.device, offset, layout, writes)
    };
    let mut uses = vec![matrix(product.d, product.ldd, product.stride_d, true)];
    if !product.beta.is_zero() {
        uses.push(matrix(product.c, shape.ldc, product.strides().stride_c, false));
    }
    let mut read = |offset, bytes: usize| uses.push(on(product.device, offset, Layout::whole(bytes as u64), false));
    if let Some((bias, data_type)) = product.bias {
        read(bias + panel.row * data_type.bytes(), panel.rows * data_type.bytes());
    }
    for factor in [product.alpha, product.beta] {
        if let Factor::At { offset, data_type } = factor {
            read(offset, data_type.bytes());
        }
    }
    uses
}

/// The part of the workspace that a panel takes.
fn workspace(product: &Arc<Product>, panel: Panel, writes: bool, on: On<'_>) -> Use {
    let bytes = panel.rows * panel.columns * panel.batches * intermediate_bytes(product.shape.data_type);
    let role = Role::Workspace { product: Arc::as_ptr(product).addr(), of_handle: product.own.is_some() };
    Use { role, ..on(product.device, product.workspace, Layout::whole(bytes as u64), writes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(layout: Layout) -> Vec<(u64, u64)> {
        layout.runs().collect()
    }

    #[test]
    fn packed_matrices_are_one_run_and_padded_ones_a_run_for_each_column() {
        assert_eq!(runs(Layout::matrices(3, (4, 3), (2, 12), 4)), [(0, 96)]);
        assert_eq!(runs(Layout::matrices(3, (2, 5), (2, 100), 4)), [(0, 12), (20, 12), (400, 12), (420, 12)]);
        assert_eq!(runs(Layout::matrices(3, (1, 5), (2, 5), 2)), [(0, 6), (10, 6)]);
        assert_eq!(runs(Layout::matrices(3, (2, 3), (5, 0), 1)), [(0, 6)], "one matrix for the whole batch");
        assert_eq!(Layout::matrices(3, (2, 5), (2, 100), 4).extent(), 400 + 20 + 12);
        assert_eq!(Layout::matrices(0, (2, 5), (2, 100), 4).extent(), 0);
    }
}
