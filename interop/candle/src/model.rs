//! The model: a multilayer perceptron whose weights and inputs come from host memory.

use candle_core::{Device, Result, Tensor};
use serde::Serialize;

use crate::ways::{Staging, Way};

/// The sizes of a model.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Sizes {
    pub batch: usize,
    pub width: usize,
    pub layers: usize,
    /// Whether the model has no bias and activation, which need candle's kernels.
    pub products_only: bool,
}

impl Sizes {
    /// Returns the bytes that are staged for one run: the weights, the biases and a batch of inputs.
    pub fn staged_bytes(&self) -> usize {
        (self.layers * (self.width + 1) * self.width + self.batch * self.width) * size_of::<f32>()
    }
}

/// The values of a model in host memory.
#[derive(Debug)]
pub struct Values {
    pub sizes: Sizes,
    weights: Vec<Vec<f32>>,
    biases: Vec<Vec<f32>>,
    inputs: Vec<f32>,
}

impl Values {
    /// Makes values that are the same in each run.
    pub fn new(sizes: Sizes) -> Self {
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        let mut values = |count: usize, scale: f32| {
            let next = || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                ((state >> 40) as f32 / (1_u64 << 24) as f32 - 0.5) * 2.0 * scale
            };
            std::iter::repeat_with(next).take(count).collect::<Vec<_>>()
        };
        // Keeps the numbers of all layers near 1.
        let scale = (3.0 / sizes.width as f32).sqrt();
        Self {
            sizes,
            weights: (0..sizes.layers).map(|_| values(sizes.width * sizes.width, scale)).collect(),
            biases: (0..sizes.layers).map(|_| values(sizes.width, 0.5)).collect(),
            inputs: values(sizes.batch * sizes.width, 1.0),
        }
    }

    /// Returns the values of each tensor, the inputs last.
    pub fn tensors(&self) -> impl Iterator<Item = (&[f32], (usize, usize))> {
        let Sizes { batch, width, .. } = self.sizes;
        let weights = self.weights.iter().map(move |it| (&it[..], (width, width)));
        let biases = self.biases.iter().map(move |it| (&it[..], (1, width)));
        weights.chain(biases).chain([(&self.inputs[..], (batch, width))])
    }

    /// Runs the model with candle on the CPU.
    pub fn on_cpu(&self) -> Result<Vec<f32>> {
        Model::alone(self, &Device::Cpu)?.run(&Way::Candle)?.flatten_all()?.to_vec1()
    }
}

/// A model and a batch of inputs in memory of a device.
pub struct Model {
    sizes: Sizes,
    weights: Vec<Tensor>,
    biases: Vec<Tensor>,
    inputs: Tensor,
}

impl Model {
    fn of(mut tensors: Vec<Tensor>, sizes: Sizes) -> Self {
        let inputs = tensors.pop().expect("`tensors` ends with the inputs");
        let biases = tensors.split_off(sizes.layers);
        Self { sizes, weights: tensors, biases, inputs }
    }

    /// Copies all values with candle alone.
    pub fn alone(values: &Values, device: &Device) -> Result<Self> {
        let tensors = values.tensors().map(|(values, shape)| Tensor::from_slice(values, shape, device));
        Ok(Self::of(tensors.collect::<Result<_>>()?, values.sizes))
    }

    /// Stages all values.
    pub fn stage(values: &Values, staging: &mut Staging<'_>) -> Result<Self> {
        let tensors = values.tensors().map(|(values, shape)| staging.tensor(values, shape));
        Ok(Self::of(tensors.collect::<Result<_>>()?, values.sizes))
    }

    /// Runs the model with the products of `way`.
    pub fn run(&self, way: &Way) -> Result<Tensor> {
        self.weights.iter().zip(&self.biases).try_fold(self.inputs.clone(), |x, (weight, bias)| {
            let x = way.product(&x, weight)?;
            if self.sizes.products_only { Ok(x) } else { x.broadcast_add(bias)?.gelu() }
        })
    }
}
