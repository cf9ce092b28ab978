//! The memory that a command reads and writes, for observers.

use std::sync::Arc;

use highwater_hal::{CopyShape, HostPtr, Transpose};

use crate::command::Command;
use crate::device::{Device, Retired};
use crate::kernel::{Factor, Panel, Product, intermediate_bytes};
use crate::observer::{Layout, Range, Role, Space, Store, Touch, Use};

/// Returns what a command reads and writes.
pub(crate) fn uses(command: &Command, devices: &[Arc<Device>]) -> Vec<Use> {
    let on = |device: u32, offset: usize, layout: Layout, writes: bool| {
        let address = devices[device as usize].memory.base() + offset as u64;
        let range = Range { space: Space::Device(device), address, bytes: layout.extent() };
        Use { range, layout, writes, role: Role::Whole }
    };
    let whole = |device, offset, bytes: usize, writes| on(device, offset, Layout::whole(bytes as u64), writes);
    let rows = |shape: CopyShape, pitch| Layout::matrices(shape.width, (shape.height, pitch), (1, 0), 1);
    let host = |address: HostPtr, layout: Layout, writes: bool| {
        let range = Range { space: Space::Host, address: address.address() as u64, bytes: layout.extent() };
        Use { range, layout, writes, role: Role::Whole }
    };
    let mut uses = match *command {
        Command::CopyToDevice { src, dst, shape, device } => {
            let (from, to) = (rows(shape, shape.src_pitch), rows(shape, shape.dst_pitch));
            vec![host(src, from, false), on(device, dst, to, true)]
        }
        Command::CopyToHost { src, dst, shape, device } => {
            let (from, to) = (rows(shape, shape.src_pitch), rows(shape, shape.dst_pitch));
            vec![on(device, src, from, false), host(dst, to, true)]
        }
        Command::CopyOnDevices { src, src_device, dst, dst_device, shape } => {
            let (from, to) = (rows(shape, shape.src_pitch), rows(shape, shape.dst_pitch));
            vec![on(src_device, src, from, false), on(dst_device, dst, to, true)]
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
        // The memory that host code touches is unknown.
        #[cfg(feature = "simulated")]
        Command::Call(_) => Vec::new(),
        #[cfg(test)]
        Command::Panic => Vec::new(),
    };
    uses.retain(|used| used.range.bytes > 0);
    uses
}

/// Returns the memory that a command of `device` touches and its location, and whether the command frees it. Leaves out
/// memory that was closed meanwhile.
pub(crate) fn touches(command: &Command, devices: &[Arc<Device>], device: &Device) -> (Vec<Touch>, bool) {
    if let Command::Release(Retired { ptr, bytes, .. }) = *command {
        return (device.touch(ptr.get(), bytes).into_iter().collect(), true);
    }
    let mut touched = Vec::new();
    for used in uses(command, devices) {
        match used.range.space {
            Space::Host => touched.push(Touch { store: Store::Host, start: used.range.address, used }),
            Space::Device(device) => touch_each(&devices[device as usize], used, &mut touched),
        }
    }
    (touched, false)
}

/// Adds the places of a use. Mapped memory may lie in several.
fn touch_each(device: &Device, used: Use, touched: &mut Vec<Touch>) {
    let Range { space, address, bytes } = used.range;
    match device.locate(address) {
        Some((store, start, left)) if bytes <= left => return touched.push(Touch { store, start, used }),
        Some(_) => {}
        None => return,
    }
    for (offset, length) in used.layout.runs() {
        let (mut next, end) = (address + offset, address + offset + length);
        while next < end {
            let Some((store, start, left)) = device.locate(next) else { break };
            let bytes = left.min(end - next);
            let part = Touch::whole(store, start, Range { space, address: next, bytes });
            touched.push(Touch { used: Use { writes: used.writes, role: used.role, ..part.used }, ..part });
            next += bytes;
        }
    }
}

type On<'a> = &'a dyn Fn(u32, usize, Layout, bool) -> Use;

fn factors(product: &Product, on: On<'_>) -> Vec<Use> {
    if product.ignores_factors() {
        return Vec::new();
    }
    let shape = &product.shape;
    let stored = |transpose, rows, columns| if transpose == Transpose::No { (rows, columns) } else { (columns, rows) };
    let (strides, size) = (product.strides(), shape.data_type.bytes());
    let read = |name, offset, (rows, columns), ld, stride| {
        let layout = Layout::matrices(rows, (columns, ld), (strides.count, stride), size);
        Use { role: Role::Operand(name), ..on(product.device, offset, layout, false) }
    };
    vec![
        read("A", product.a, stored(shape.transpose_a, shape.m, shape.k), shape.lda, strides.stride_a),
        read("B", product.b, stored(shape.transpose_b, shape.k, shape.n), shape.ldb, strides.stride_b),
    ]
}

fn results(product: &Product, panel: Panel, on: On<'_>) -> Vec<Use> {
    let (shape, size) = (&product.shape, product.shape.output.bytes());
    let matrix = |name, first: usize, ld: usize, stride: usize, writes| {
        let offset = first + (panel.batch * stride + panel.column * ld + panel.row) * size;
        let layout = Layout::matrices(panel.rows, (panel.columns, ld), (panel.batches, stride), size);
        Use { role: Role::Operand(name), ..on(product.device, offset, layout, writes) }
    };
    let result = if product.in_place { "C" } else { "D" };
    let mut uses = vec![matrix(result, product.d, product.ldd, product.stride_d, true)];
    if !product.beta.is_zero() {
        uses.push(matrix("C", product.c, shape.ldc, product.strides().stride_c, false));
    }
    let mut read = |name, offset, bytes: usize| {
        let used = on(product.device, offset, Layout::whole(bytes as u64), false);
        uses.push(Use { role: Role::Operand(name), ..used });
    };
    if let Some((bias, data_type)) = product.bias {
        read("bias", bias + panel.row * data_type.bytes(), panel.rows * data_type.bytes());
    }
    for (name, factor) in [("alpha", product.alpha), ("beta", product.beta)] {
        if let Factor::At { offset, data_type } = factor {
            read(name, offset, data_type.bytes());
        }
    }
    uses
}

/// Returns the part of the workspace that a panel takes.
fn workspace(product: &Arc<Product>, panel: Panel, writes: bool, on: On<'_>) -> Use {
    let bytes = panel.rows * panel.columns * panel.batches * intermediate_bytes(product.shape.data_type);
    let role = Role::Workspace { product: Arc::as_ptr(product).addr(), of_handle: product.own.is_some() };
    Use { role, ..on(product.device, product.workspace, Layout::whole(bytes as u64), writes) }
}
