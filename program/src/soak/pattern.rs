//! The contents of a shared buffer, which name its owner.
//!
//! Each buffer has its own tag, and two areas of `side * side` words. Only the owner writes the mark. Every process fills scratch,
//! and copies into it. In any order of these steps, every word shows the tag, unless the buffer was freed or another process wrote
//! to it.

use std::ops::Range;

use highwater::{DeviceBuffer, Result, Stream};

const TAG_BITS: u32 = 24;

/// The use of the words of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pattern {
    tag: u32,
    side: usize,
}

/// The result of a successful check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seen {
    /// Words that were changed as permitted.
    pub(super) changed: u64,
}

impl Pattern {
    /// Sides that a buffer may have.
    pub(super) const SIDES: [usize; 4] = [8, 16, 32, 64];

    /// Returns the pattern of a tag, of which the lowest 24 bits count.
    pub(super) fn new(tag: u64, side: usize) -> Self {
        Self { tag: (tag % (1 << TAG_BITS)) as u32, side }
    }

    pub(super) fn tag(self) -> u64 {
        u64::from(self.tag)
    }

    pub(super) fn side(self) -> usize {
        self.side
    }

    /// Returns the number of words of the whole buffer.
    pub(super) fn len(self) -> usize {
        2 * self.area()
    }

    fn area(self) -> usize {
        self.side * self.side
    }

    fn mark(self) -> Range<usize> {
        0..self.area()
    }

    pub(super) fn scratch(self) -> Range<usize> {
        self.area()..2 * self.area()
    }

    fn word(self, low: u8) -> u32 {
        self.tag << 8 | u32::from(low)
    }

    /// Enqueues the contents of a new buffer.
    pub(super) fn write(self, stream: &Stream, buffer: &DeviceBuffer<u32>) -> Result<()> {
        stream.fill(buffer, self.word(0))
    }

    /// Writes the contents of new memory of the CPU.
    pub(super) fn write_host(self, words: &mut [u32]) {
        words.fill(self.word(0));
    }

    /// Enqueues a fill of scratch, which any process may do.
    pub(super) fn fill(self, stream: &Stream, buffer: &DeviceBuffer<u32>, part: Range<usize>, low: u8) -> Result<()> {
        stream.fill(buffer.slice(part)?, self.word(low))
    }

    /// Enqueues a copy of the mark to scratch.
    pub(super) fn copy(self, stream: &Stream, buffer: &DeviceBuffer<u32>) -> Result<()> {
        stream.copy(buffer.slice(self.mark())?, buffer.slice(self.scratch())?)
    }

    /// Checks all words against this pattern. Returns the fault if one is wrong.
    pub(super) fn check(self, words: &[u32]) -> Result<Seen, String> {
        let wrong = |index: usize| {
            let (word, tag) = (words[index], self.tag);
            let part = ["the mark", "scratch"][index / self.area()];
            Err(format!("word {index} of the buffer with the tag {tag}, in {part}, is {word:#010x}"))
        };
        if words.len() != self.len() {
            return Err(format!("the buffer has {} words, expected {}", words.len(), self.len()));
        }
        let scratch = self.scratch();
        let is_wrong = |(index, &word): (usize, &u32)| match index {
            index if index < scratch.start => word != self.word(0),
            _ => word >> 8 != self.tag,
        };
        if let Some(index) = words.iter().enumerate().position(is_wrong) {
            return wrong(index);
        }
        Ok(Seen { changed: words[scratch].iter().filter(|&&word| word != self.word(0)).count() as u64 })
    }
}

#[cfg(test)]
mod tests {
    use highwater::Runtime;
    use highwater::mock::{MockGpu, MockOptions};

    use super::*;

    #[test]
    fn the_steps_of_processes_keep_the_pattern_and_another_tag_shows() {
        let runtime = Runtime::new(MockGpu::open(MockOptions::new()).unwrap()).unwrap();
        let stream = runtime.device(0).unwrap().create_stream().unwrap();
        for side in Pattern::SIDES {
            let (pattern, other) = (Pattern::new(70_000, side), Pattern::new(70_001, side));
            let buffer = runtime.device(0).unwrap().allocate(pattern.len()).unwrap();
            pattern.write(&stream, &buffer).unwrap();
            let words = stream.download(&buffer).unwrap();
            assert_eq!(pattern.check(&words), Ok(Seen { changed: 0 }));
            assert!(other.check(&words).unwrap_err().contains("in the mark"));

            let scratch = pattern.scratch();
            pattern.copy(&stream, &buffer).unwrap();
            pattern.fill(&stream, &buffer, scratch.start..scratch.start + 5, 9).unwrap();
            let words = stream.download(&buffer).unwrap();
            assert_eq!(pattern.check(&words), Ok(Seen { changed: 5 }));

            other.fill(&stream, &buffer, scratch.end - 1..scratch.end, 0).unwrap();
            let error = pattern.check(&stream.download(&buffer).unwrap()).unwrap_err();
            assert!(error.contains(&format!("word {}", scratch.end - 1)) && error.contains("in scratch"), "{error}");
        }
    }
}
