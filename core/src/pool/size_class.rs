//! Size classes of the host cache: eight steps to each power of two, so that at most one eighth of a block is wasted.

/// All smaller sizes are one class: the kernel locks whole pages.
const SMALLEST: usize = 4096;
/// Blocks of 2^47 bytes and more are refused earlier.
const LARGEST_LOG2: u32 = 47;

/// The number of classes.
pub(crate) const COUNT: usize = ((LARGEST_LOG2 - SMALLEST.ilog2()) as usize) * 8 + 1;

/// Returns the class of a request, and the size of that class's blocks. Returns `None` for more than the largest class.
pub(crate) fn of(bytes: usize) -> Option<(usize, usize)> {
    let bytes = bytes.max(SMALLEST);
    let log2 = bytes.ilog2();
    if log2 >= LARGEST_LOG2 {
        return None;
    }
    let step = log2 - 3;
    // 8 to 16 steps. 16 is the first class of the next power of two, and the same formula yields that class.
    let steps = bytes.div_ceil(1 << step);
    let class = (log2 - SMALLEST.ilog2()) as usize * 8 + steps - 8;
    Some((class, steps << step))
}

/// Returns the size of a class's blocks.
pub(crate) fn block_bytes(class: usize) -> usize {
    (8 + class % 8) << (class / 8 + SMALLEST.ilog2() as usize - 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_large_enough_and_wastes_at_most_an_eighth() {
        for bytes in (0..200_000).chain([1 << 20, (1 << 20) + 1, (150 << 20) + 7, (1 << 47) - 1]) {
            let (class, block) = of(bytes).unwrap();
            assert!(class < COUNT, "{bytes}");
            assert!(block >= bytes);
            assert_eq!(block_bytes(class), block, "{bytes}");
            assert!(bytes < SMALLEST || block - bytes <= bytes / 8, "{bytes} in {block}");
        }
        assert_eq!(of(1 << 47), None);
    }

    #[test]
    fn equal_classes_have_equal_blocks_and_grow_together() {
        let mut last = of(1).unwrap();
        for bytes in 1..100_000 {
            let now = of(bytes).unwrap();
            assert!(now == last || (now.0 == last.0 + 1 && now.1 > last.1), "{bytes}: {last:?} {now:?}");
            last = now;
        }
        assert_eq!(of(4097).unwrap().1, 4608);
        assert_eq!(of(8191).unwrap(), of(8192).unwrap());
    }
}
