//! The task of the main job: the test images in batches, and the count of the answers.

use std::ops::Range;
use std::path::Path;

use anyhow::Result;

use super::model::{self, Network, TestSet};

/// Images of a batch. The last batch of a pass is padded with black images.
pub(super) const BATCH: usize = 32;

#[derive(Debug)]
pub(super) struct Task {
    pub(super) network: Network,
    pub(super) test: TestSet,
    /// The predictions of the CPU, for comparison with those of the device.
    expected: Vec<u8>,
    /// Number of passes over the test set.
    pub(super) repeat: usize,
}

impl Task {
    /// Loads the task from the files of `folder`, or from the built-in ones.
    pub(super) fn load(folder: Option<&Path>, repeat: usize) -> Result<Self> {
        let (network, test) = model::load(folder)?;
        Ok(Self::new(network, test, repeat))
    }

    pub(super) fn new(network: Network, test: TestSet, repeat: usize) -> Self {
        let classify = |index| network.classify(&test.image(index).collect::<Vec<_>>()) as u8;
        let expected = (0..test.len()).map(classify).collect();
        Self { network, test, expected, repeat }
    }

    /// Returns the number of images of all passes.
    pub(super) fn images(&self) -> u64 {
        self.test.len() as u64 * self.repeat as u64
    }

    fn batches_per_pass(&self) -> u64 {
        self.test.len().div_ceil(BATCH) as u64
    }

    /// Returns the number of batches of all passes.
    pub(super) fn batches(&self) -> u64 {
        self.batches_per_pass() * self.repeat as u64
    }

    /// Returns the positions of a batch in the test set. Batches are numbered through all passes.
    fn place(&self, batch: u64) -> Range<usize> {
        let start = (batch % self.batches_per_pass()) as usize * BATCH;
        start..(start + BATCH).min(self.test.len())
    }

    /// Returns the images of a batch, which are numbered through all passes.
    pub(super) fn images_of(&self, batch: u64) -> Range<u64> {
        let before = batch / self.batches_per_pass() * self.test.len() as u64;
        let place = self.place(batch);
        before + place.start as u64..before + place.end as u64
    }

    /// Returns the pixels of a batch.
    pub(super) fn pixels(&self, batch: u64) -> &[u8] {
        self.test.pixels(self.place(batch))
    }

    /// Counts the answer to a batch, which has one digit for each image.
    pub(super) fn count(&self, batch: u64, digits: &[u8]) -> Tally {
        let mut tally = Tally::default();
        for (image, &digit) in self.place(batch).zip(digits) {
            tally.images += 1;
            tally.correct += u64::from(digit == self.test.labels[image]);
            tally.differing += u64::from(digit != self.expected[image]);
        }
        tally
    }
}

/// Counts of predictions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) images: u64,
    pub(super) correct: u64,
    /// Predictions that differ from those of the CPU.
    pub(super) differing: u64,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.images += other.images;
        self.correct += other.correct;
        self.differing += other.differing;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_image_of_every_pass_is_in_one_batch() {
        let task = Task::load(None, 3).unwrap();
        let batches: Vec<_> = (0..task.batches()).map(|batch| task.images_of(batch)).collect();
        assert_eq!((batches[0].start, batches.last().unwrap().end), (0, task.images()));
        assert!(batches.windows(2).all(|pair| pair[0].end == pair[1].start), "{batches:?}");
        for batch in 0..task.batches() {
            let images = task.images_of(batch);
            let pixels: Vec<_> = images.flat_map(|image| task.test.pixels(place(image % 540))).copied().collect();
            assert_eq!(task.pixels(batch), pixels);
        }
    }

    fn place(image: u64) -> Range<usize> {
        image as usize..image as usize + 1
    }

    #[test]
    fn answers_are_compared_with_the_labels_and_with_the_cpu() {
        let task = Task::load(None, 1).unwrap();
        let right = task.test.labels[..BATCH].to_vec();
        assert_eq!(task.count(0, &right), Tally { images: 32, correct: 32, differing: 0 });
        let mut wrong = right;
        wrong[3] = (wrong[3] + 1) % 10;
        assert_eq!(task.count(0, &wrong), Tally { images: 32, correct: 31, differing: 1 });
    }
}
