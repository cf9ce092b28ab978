//! The random numbers of NumPy: `default_rng(seed)` with `integers`, `random` and `uniform`, bit for bit.
//!
//! The traces of the peers' programs are drawn by NumPy. With the same numbers, this program measures the same traces. The
//! generator is PCG64 (XSL-RR), seeded by NumPy's `SeedSequence`; bounded integers follow Lemire's method over halves of 64 bits.

/// Words of the pool of a `SeedSequence`.
const POOL: usize = 4;
const MULTIPLIER: u128 = 0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645;

/// The generator that `numpy.random.default_rng(seed)` returns.
#[derive(Debug, Clone)]
pub(super) struct NumpyRng {
    state: u128,
    increment: u128,
    /// The upper half of the last number of which only the lower half was used.
    half: Option<u32>,
}

impl NumpyRng {
    pub(super) fn new(seed: u64) -> Self {
        let [a, b, c, d] = seed_state(seed);
        let wide = |high: u64, low: u64| u128::from(high) << 64 | u128::from(low);
        let mut rng = Self { state: 0, increment: wide(c, d) << 1 | 1, half: None };
        rng.step();
        rng.state = rng.state.wrapping_add(wide(a, b));
        rng.step();
        rng
    }

    fn step(&mut self) {
        self.state = self.state.wrapping_mul(MULTIPLIER).wrapping_add(self.increment);
    }

    fn next_u64(&mut self) -> u64 {
        self.step();
        let folded = (self.state >> 64) as u64 ^ self.state as u64;
        folded.rotate_right((self.state >> 122) as u32)
    }

    fn next_u32(&mut self) -> u32 {
        if let Some(half) = self.half.take() {
            return half;
        }
        let both = self.next_u64();
        self.half = Some((both >> 32) as u32);
        both as u32
    }

    /// Returns a number of `0.0..1.0`, as `random()`.
    pub(super) fn random(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a number of `low..high`, as `uniform(low, high)`.
    pub(super) fn uniform(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.random()
    }

    /// Returns a number of `low..high`, as `integers(low, high)`. The range must have 2 to 2^32 - 1 numbers.
    pub(super) fn integers(&mut self, low: u64, high: u64) -> u64 {
        let count = (high - low) as u32;
        let mut product = u64::from(self.next_u32()) * u64::from(count);
        if (product as u32) < count {
            let threshold = count.wrapping_neg() % count;
            while (product as u32) < threshold {
                product = u64::from(self.next_u32()) * u64::from(count);
            }
        }
        low + (product >> 32)
    }
}

/// Returns the four words that `SeedSequence(seed).generate_state(4, uint64)` returns.
fn seed_state(seed: u64) -> [u64; 4] {
    let mut hash = 0x43b0_d7e5_u32;
    let mut hashed = |value: u32| {
        let value = value ^ hash;
        hash = hash.wrapping_mul(0x931e_8875);
        let value = value.wrapping_mul(hash);
        value ^ value >> 16
    };
    let mut pool = [hashed(seed as u32), hashed((seed >> 32) as u32), hashed(0), hashed(0)];
    for source in 0..POOL {
        for target in (0..POOL).filter(|&target| target != source) {
            let right = hashed(pool[source]).wrapping_mul(0x4973_f715);
            let mixed = pool[target].wrapping_mul(0xca01_f9dd).wrapping_sub(right);
            pool[target] = mixed ^ mixed >> 16;
        }
    }
    let mut hash = 0x8b51_f9dd_u32;
    let mut word = |index: usize| {
        let value = pool[index % POOL] ^ hash;
        hash = hash.wrapping_mul(0x58f3_8ded);
        let value = value.wrapping_mul(hash);
        u64::from(value ^ value >> 16)
    };
    std::array::from_fn(|index| word(2 * index) | word(2 * index + 1) << 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Printed by NumPy 2.4.6.

    #[test]
    fn raw_numbers_are_numpys() {
        let mut rng = NumpyRng::new(12_345_678_901_234_567_890);
        let expected = [0x0114_e1b8_8d30_6508, 0xa700_0427_81d3_a29c, 0x9b9e_0e7d_c8c7_370c];
        assert_eq!([(); 3].map(|()| rng.next_u64()), expected);
    }

    #[test]
    fn integers_and_fractions_are_numpys_in_any_order() {
        let mut rng = NumpyRng::new(7);
        assert_eq!([(); 6].map(|()| rng.integers(0, 200)), [188, 125, 136, 179, 115, 155]);
        assert_eq!(rng.random(), 0.225_207_189_990_591_86);
        assert_eq!([(); 3].map(|()| rng.integers(0, 33 << 20)), [1_921_559, 10_386_656, 9_864_176]);
        // The half that the three integers left is kept.
        assert_eq!(rng.uniform(2.0, 5.0), 2.015_795_913_696_724_3);
    }
}
