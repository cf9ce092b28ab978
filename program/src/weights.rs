//! The weights of the network in device memory. One process uploads them, and others open them.
//!
//! All layers are in one block, so one ticket shares them all.
//!
//! *Layout.* BLAS matrices are column-major, safetensors row-major. A row-major weight, inputs x outputs, is a
//! column-major matrix, outputs x inputs, and a batch of images is a matrix with one image in each column. So a layer is
//! `weight * images + bias` without a transposition, and the bias has one value for each row, as Lt's epilogues want it.

use std::ops::Range;

use highwater::hal::counted;
use highwater::{
    Device, DeviceBuffer, DeviceSlice, Epilogue, Error, ErrorKind, GemmShape, Result, Runtime, Stream, Ticket,
    Transport,
};

use super::model::{LAYERS, Network};
use super::task::BATCH;

/// The alignment of each matrix and bias in values: 256 bytes, as for a block of memory.
const ALIGNMENT: usize = 64;

/// The weights on one device.
#[derive(Debug)]
pub(super) struct Weights {
    values: DeviceBuffer<f32>,
    pub(super) layers: Vec<DeviceLayer>,
}

/// A layer, and its position in the block.
#[derive(Debug)]
pub(super) struct DeviceLayer {
    pub(super) shape: GemmShape,
    pub(super) epilogue: Epilogue,
    weight: Range<usize>,
    bias: Range<usize>,
}

/// Returns the layers, and the number of values of the block.
fn layout() -> (Vec<DeviceLayer>, usize) {
    let mut end: usize = 0;
    let mut take = |values: usize| {
        let start = end.next_multiple_of(ALIGNMENT);
        end = start + values;
        start..end
    };
    let layer = |(index, &(inputs, outputs)): (usize, &(usize, usize))| DeviceLayer {
        shape: GemmShape::of::<f32>(outputs, BATCH, inputs),
        epilogue: if index + 1 == LAYERS.len() { Epilogue::Bias } else { Epilogue::BiasRelu },
        weight: take(inputs * outputs),
        bias: take(outputs),
    };
    let layers = LAYERS.iter().enumerate().map(layer).collect();
    (layers, end)
}

/// Returns true if other processes can open memory of this device.
pub(super) fn can_be_shared(device: &Device) -> bool {
    let capabilities = device.capabilities();
    capabilities.shareable_memory && !capabilities.ipc_transports.is_empty()
}

/// Returns the ordinals of the devices for workers: other processes can open their memory, and they run the layers.
pub(super) fn devices_for_workers(runtime: &Runtime) -> Result<Vec<u32>> {
    let mut devices = Vec::new();
    for ordinal in 0..runtime.device_count() {
        let device = runtime.device(ordinal)?;
        if can_be_shared(&device) && device.capabilities().gemm_f32 {
            devices.push(ordinal);
        }
    }
    Ok(devices)
}

/// Returns the name of a transport for reports.
pub(super) fn transport_name(transport: Transport) -> &'static str {
    match transport {
        Transport::Legacy => "legacy",
        Transport::Descriptor => "descriptor",
        Transport::Fabric => "fabric",
        _ => "unknown",
    }
}

impl Weights {
    /// Uploads the weights to the stream's device, and waits for that. With `shared`, other processes can open the memory.
    pub(super) fn upload(stream: &Stream, network: &Network, shared: bool) -> Result<Self> {
        let (layers, len) = layout();
        let mut values = vec![0.0; len];
        for (place, layer) in layers.iter().zip(&network.layers) {
            values[place.weight.clone()].copy_from_slice(&layer.weight);
            values[place.bias.clone()].copy_from_slice(&layer.bias);
        }
        let device = stream.runtime().device(stream.device())?;
        let block = if shared { device.allocate_shared(len) } else { device.allocate(len) }?;
        stream.write(&values, &block)?;
        stream.synchronize()?;
        Ok(Self { values: block, layers })
    }

    /// Returns the ticket with which another process opens the weights.
    pub(super) fn share(&self) -> Result<Ticket> {
        self.values.share()
    }

    /// Returns the ordinal of their device in this process.
    pub(super) fn device(&self) -> u32 {
        self.values.device()
    }

    /// Opens the weights of another process, on the device that the ticket names by its UUID.
    pub(super) fn open(runtime: &Runtime, ticket: &Ticket) -> Result<Self> {
        let (layers, len) = layout();
        let values = runtime.open_shared::<f32>(ticket)?;
        if values.len() != len {
            let message =
                format!("the ticket is for {}, expected the {len} of the weights", counted(values.len(), "value"));
            return Err(Error::new(ErrorKind::InvalidArgument, "open_shared", message)
                .with_hint("share the block of `Weights::upload`"));
        }
        Ok(Self { values, layers })
    }

    /// Returns the weight and the bias of a layer.
    pub(super) fn of(&self, layer: &DeviceLayer) -> Result<(DeviceSlice<'_, f32>, DeviceSlice<'_, f32>)> {
        Ok((self.values.slice(layer.weight.clone())?, self.values.slice(layer.bias.clone())?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_the_block_are_aligned_and_apart() {
        let (layers, len) = layout();
        let parts: Vec<_> = layers.iter().flat_map(|layer| [&layer.weight, &layer.bias]).collect();
        assert!(parts.iter().all(|part| part.start % ALIGNMENT == 0));
        assert!(parts.windows(2).all(|pair| pair[0].end <= pair[1].start), "{parts:?}");
        assert_eq!(parts[parts.len() - 1].end, len);
        // With these layers, no value is lost between the parts.
        assert_eq!(len, LAYERS.iter().map(|(inputs, outputs)| inputs * outputs + outputs).sum::<usize>());
    }
}
