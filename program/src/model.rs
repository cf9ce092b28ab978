//! The network and the test images: reading from safetensors, checks, and evaluation on the CPU.

use std::fs;
use std::io::{self, Read as _};
use std::ops::Range;
use std::path::Path;

use anyhow::Result;
use highwater::ErrorKind;
use highwater::hal::{counted, display_foreign};
use safetensors::{Dtype, SafeTensors};

use super::failure::Failure;

/// Pixels of an image.
pub(super) const PIXELS: usize = 64;
/// Classes of images.
pub(super) const CLASSES: usize = 10;
/// Value of the brightest pixel.
const WHITE: u8 = 16;
/// The most bytes that are read of a file: far more than such a network has, and small for the machine's memory.
const LARGEST_FILE: u64 = 16 << 20;
/// Inputs and outputs of each layer.
pub(super) const LAYERS: [(usize, usize); 3] = [(PIXELS, 128), (128, 64), (64, CLASSES)];

/// The most tensors that a message lists.
const MOST_NAMES: usize = 16;

const WEIGHTS_FILE: &str = "weights.safetensors";
const TEST_FILE: &str = "test.safetensors";
static WEIGHTS: &[u8] = include_bytes!("../digits/weights.safetensors");
static TEST: &[u8] = include_bytes!("../digits/test.safetensors");

/// A fully connected layer: `x @ weight + bias`, with ReLU after all layers but the last.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) outputs: usize,
    /// Row-major, inputs x outputs, which is the same as column-major, outputs x inputs.
    pub(super) weight: Vec<f32>,
    pub(super) bias: Vec<f32>,
}

#[derive(Debug)]
pub(super) struct Network {
    pub(super) layers: Vec<Layer>,
}

/// Images and their digits.
#[derive(Debug)]
pub(super) struct TestSet {
    /// The images, one after the other, of `PIXELS` each.
    pixels: Vec<u8>,
    pub(super) labels: Vec<u8>,
}

/// Loads the network and the test set from `folder`, or the built-in ones.
pub(super) fn load(folder: Option<&Path>) -> Result<(Network, TestSet)> {
    let Some(folder) = folder else {
        return Ok((Network::parse(WEIGHTS, WEIGHTS_FILE)?, TestSet::parse(TEST, TEST_FILE)?));
    };
    let read = |name: &str| -> Result<(Vec<u8>, String)> {
        let path = folder.join(name);
        let bytes = read_file(&path).map_err(|error| {
            let hint = format!(
                "`--data` names a folder with `{WEIGHTS_FILE}` and `{TEST_FILE}`; without it the built-in ones are used"
            );
            let what = format!("`{}` cannot be read", display_foreign(&path));
            Failure::new(ErrorKind::InvalidArgument, what, hint).because_of(error)
        })?;
        Ok((bytes, display_foreign(&path).to_string()))
    };
    let (weights, weights_name) = read(WEIGHTS_FILE)?;
    let (test, test_name) = read(TEST_FILE)?;
    Ok((Network::parse(&weights, &weights_name)?, TestSet::parse(&test, &test_name)?))
}

/// Reads a regular file of bounded size. Rejects an endless device, and a pipe without a writer.
fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    // Checked before it is opened, because opening a pipe waits for its other end.
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let mut bytes = Vec::new();
    // One byte more proves that a file is too large, whatever size it reports.
    fs::File::open(path)?.take(LARGEST_FILE + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LARGEST_FILE {
        return Err(io::Error::other(format!("it is larger than {LARGEST_FILE} bytes, the most that is read")));
    }
    Ok(bytes)
}

fn corrupt(message: String) -> Failure {
    Failure::new(
        ErrorKind::InvalidArgument,
        message,
        "make the file anew with `program/digits/train.py`, or leave `--data` out",
    )
}

/// A parsed file, with its name for messages.
struct File<'a> {
    name: &'a str,
    tensors: SafeTensors<'a>,
}

impl<'a> File<'a> {
    fn parse(bytes: &'a [u8], name: &'a str) -> Result<Self> {
        let tensors = SafeTensors::deserialize(bytes).map_err(|error| {
            corrupt(format!("`{name}` ({}) is not a safetensors file", counted(bytes.len(), "byte"))).because_of(error)
        })?;
        Ok(Self { name, tensors })
    }

    /// Returns the bytes of a tensor after checking its type and shape. `None` in a shape is any extent but 0.
    fn tensor(&self, tensor: &str, dtype: Dtype, shape: &[Option<usize>]) -> Result<&'a [u8]> {
        let wanted = || {
            let extents: Vec<_> = shape.iter().map(|n| n.map_or_else(|| "N".to_owned(), |n| n.to_string())).collect();
            format!("{dtype:?} [{}]", extents.join(", "))
        };
        let Ok(view) = self.tensors.tensor(tensor) else {
            let mut names = self.tensors.names();
            names.sort_unstable();
            let mut shown: Vec<_> =
                names.iter().take(MOST_NAMES).map(|name| display_foreign(name).to_string()).collect();
            if names.len() > shown.len() {
                shown.push(format!("and {} more", names.len() - shown.len()));
            }
            let names = shown.join(", ");
            return Err(
                corrupt(format!("`{}` has no tensor `{tensor}` ({}); it has: {names}", self.name, wanted())).into()
            );
        };
        let fits = |(&has, wants): (&usize, &Option<usize>)| wants.map_or(has > 0, |wants| has == wants);
        if view.dtype() != dtype || view.shape().len() != shape.len() || !view.shape().iter().zip(shape).all(fits) {
            let (has, shape) = (view.dtype(), view.shape());
            return Err(
                corrupt(format!("`{tensor}` in `{}` is {has:?} {shape:?}, expected {}", self.name, wanted())).into()
            );
        }
        Ok(view.data())
    }

    fn floats(&self, tensor: &str, shape: &[Option<usize>]) -> Result<Vec<f32>> {
        let (values, _) = self.tensor(tensor, Dtype::F32, shape)?.as_chunks::<4>();
        let values: Vec<f32> = values.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
        if let Some(index) = values.iter().position(|value| !value.is_finite()) {
            let value = values[index];
            return Err(corrupt(format!(
                "value {index} of `{tensor}` in `{}` is {value}, expected a finite number",
                self.name
            ))
            .into());
        }
        Ok(values)
    }

    fn small_numbers(&self, tensor: &str, shape: &[Option<usize>], most: u8) -> Result<Vec<u8>> {
        let values = self.tensor(tensor, Dtype::U8, shape)?;
        if let Some(index) = values.iter().position(|&value| value > most) {
            let value = values[index];
            return Err(corrupt(format!(
                "value {index} of `{tensor}` in `{}` is {value}, expected 0 to {most}",
                self.name
            ))
            .into());
        }
        Ok(values.to_vec())
    }
}

impl Network {
    fn parse(bytes: &[u8], name: &str) -> Result<Self> {
        let file = File::parse(bytes, name)?;
        let layer = |(index, &(inputs, outputs)): (usize, &(usize, usize))| {
            Ok(Layer {
                outputs,
                weight: file.floats(&format!("layer{index}.weight"), &[Some(inputs), Some(outputs)])?,
                bias: file.floats(&format!("layer{index}.bias"), &[Some(outputs)])?,
            })
        };
        Ok(Self { layers: LAYERS.iter().enumerate().map(layer).collect::<Result<_>>()? })
    }

    /// Classifies one image with plain loops on the CPU. The device's answer is compared with the result.
    pub(super) fn classify(&self, image: &[f32]) -> usize {
        let mut values = image.to_vec();
        for (index, layer) in self.layers.iter().enumerate() {
            let mut outputs = layer.bias.clone();
            for (value, weights) in values.iter().zip(layer.weight.chunks_exact(layer.outputs)) {
                for (output, weight) in outputs.iter_mut().zip(weights) {
                    *output += value * weight;
                }
            }
            if index + 1 < self.layers.len() {
                outputs.iter_mut().for_each(|output| *output = output.max(0.0));
            }
            values = outputs;
        }
        largest(&values)
    }
}

impl TestSet {
    fn parse(bytes: &[u8], name: &str) -> Result<Self> {
        let file = File::parse(bytes, name)?;
        let pixels = file.small_numbers("images", &[None, Some(PIXELS)], WHITE)?;
        let images = pixels.len() / PIXELS;
        let labels = file.small_numbers("labels", &[Some(images)], CLASSES as u8 - 1)?;
        Ok(Self { pixels, labels })
    }

    /// Returns the first images, for tests that need few.
    #[cfg(test)]
    pub(super) fn first(&self, images: usize) -> Self {
        Self { pixels: self.pixels[..images * PIXELS].to_vec(), labels: self.labels[..images].to_vec() }
    }

    /// Returns the number of images.
    pub(super) fn len(&self) -> usize {
        self.labels.len()
    }

    /// Returns the pixels of some images, as in the file.
    pub(super) fn pixels(&self, images: Range<usize>) -> &[u8] {
        &self.pixels[images.start * PIXELS..images.end * PIXELS]
    }

    /// Returns one image for the network, with pixels from 0 to 1.
    pub(super) fn image(&self, index: usize) -> impl Iterator<Item = f32> {
        self.pixels(index..index + 1).iter().copied().map(brightness)
    }
}

/// Converts a pixel for the network, to 0 to 1.
pub(super) fn brightness(pixel: u8) -> f32 {
    f32::from(pixel) / f32::from(WHITE)
}

/// Returns the index of the largest value, the first of several.
pub(super) fn largest(values: &[f32]) -> usize {
    let mut best = 0;
    for (index, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = index;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use safetensors::tensor::TensorView;

    use super::*;

    /// A file with these tensors of zeros, the first with other bytes if given.
    fn file(tensors: &[(&str, Dtype, Vec<usize>)], first: Option<Vec<u8>>) -> Vec<u8> {
        let bytes = |dtype: Dtype, shape: &[usize]| shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let mut data: Vec<Vec<u8>> = tensors.iter().map(|(_, dtype, shape)| vec![0; bytes(*dtype, shape)]).collect();
        if let Some(first) = first {
            data[0] = first;
        }
        let views = tensors.iter().zip(&data).map(|((name, dtype, shape), data)| {
            ((*name).to_owned(), TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        safetensors::serialize(views, None).unwrap()
    }

    fn test_set_error(images: Dtype, shape: &[usize], labels: usize, first: Option<Vec<u8>>) -> String {
        let tensors = [("images", images, shape.to_vec()), ("labels", Dtype::U8, vec![labels])];
        format!("{:#}", TestSet::parse(&file(&tensors, first), "t").unwrap_err())
    }

    #[test]
    fn the_built_in_files_are_sound_and_the_network_is_good() {
        let (network, test) = load(None).unwrap();
        let right = |&index: &usize| {
            network.classify(&test.image(index).collect::<Vec<_>>()) == usize::from(test.labels[index])
        };
        assert_eq!(test.len(), 540);
        assert!((0..test.len()).filter(right).count() >= 519);
    }

    #[test]
    fn wrong_shapes_types_and_values_are_named_with_what_was_expected() {
        let error = test_set_error(Dtype::U8, &[3, 63], 3, None);
        assert!(error.contains("`images` in `t` is U8 [3, 63], expected U8 [N, 64]"), "{error}");
        let error = test_set_error(Dtype::I8, &[3, 64], 3, None);
        assert!(error.contains("is I8 [3, 64], expected U8 [N, 64]"), "{error}");
        let error = test_set_error(Dtype::U8, &[3, 64], 2, None);
        assert!(error.contains("`labels` in `t` is U8 [2], expected U8 [3]"), "{error}");
        let error = test_set_error(Dtype::U8, &[0, 64], 0, None);
        assert!(error.contains("U8 [0, 64], expected U8 [N, 64]"), "{error}");
        let error = test_set_error(Dtype::U8, &[1, 64], 1, Some(vec![17; 64]));
        assert!(error.contains("value 0 of `images` in `t` is 17, expected 0 to 16"), "{error}");
    }

    #[test]
    fn weights_that_are_missing_or_no_numbers_are_named() {
        let mut weight = vec![0; 64 * 128 * 4];
        weight[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
        let bytes = file(&[("layer0.weight", Dtype::F32, vec![64, 128])], Some(weight));
        let error = Network::parse(&bytes, "w").unwrap_err().to_string();
        assert!(error.contains("value 2 of `layer0.weight` in `w` is NaN"), "{error}");
        let bytes = file(&[("layer0.weight", Dtype::F32, vec![64, 128])], None);
        let error = Network::parse(&bytes, "w").unwrap_err().to_string();
        assert!(error.contains("no tensor `layer0.bias` (F32 [128]); it has: layer0.weight"), "{error}");
    }

    #[test]
    fn every_truncation_of_a_file_is_refused() {
        for length in (0..TEST.len()).step_by(1009) {
            let error = TestSet::parse(&TEST[..length], "t").unwrap_err().to_string();
            assert!(error.contains(&format!("`t` ({}) is not a safetensors file", counted(length, "byte"))), "{error}");
        }
    }
}
