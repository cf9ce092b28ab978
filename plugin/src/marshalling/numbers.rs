//! Integers, flags and enums.

use std::sync::Arc;

use super::super::codes::Coded;
use super::super::link::Link;
use super::{Answer, Argument, Tags, Wrong, choice, flag, put_plain};
use highwater_hal::{AtomicsMode, BlasKind, BlasOptions, CaptureMode, Completion, MathMode, Transport};

macro_rules! numbers {
    ($($type:ty),*) => {$(
        impl Argument for $type {
            type Form = Self;
            type Abi = Self;
            #[inline]
            fn form(&self) -> Self {
                *self
            }
            #[inline]
            fn abi(form: &Self) -> Self {
                *form
            }
            #[inline]
            unsafe fn lift(abi: Self, _: Tags) -> Result<Self, Wrong> {
                Ok(abi)
            }
        }

        impl Answer for $type {
            type Slot = Self;
            fn empty() -> Self {
                0
            }
            unsafe fn put(self, slot: *mut Self, _: Tags) -> Result<(), String> {
                // SAFETY: the caller ensures it.
                unsafe { put_plain(slot, self) }
            }
            fn lift(slot: Self, _: &Arc<Link>) -> Result<Self, String> {
                Ok(slot)
            }
        }
    )*};
}

numbers!(u32, u64);

impl Argument for usize {
    type Form = u64;
    type Abi = u64;
    #[inline]
    fn form(&self) -> u64 {
        *self as u64
    }
    #[inline]
    fn abi(form: &u64) -> u64 {
        *form
    }
    #[inline]
    unsafe fn lift(abi: u64, _: Tags) -> Result<Self, Wrong> {
        Ok(abi as usize)
    }
}

impl Answer for bool {
    type Slot = u32;
    fn empty() -> u32 {
        u32::MAX
    }
    unsafe fn put(self, slot: *mut u32, _: Tags) -> Result<(), String> {
        // SAFETY: the caller ensures it.
        unsafe { put_plain(slot, u32::from(self)) }
    }
    fn lift(slot: u32, _: &Arc<Link>) -> Result<Self, String> {
        flag(slot, "yes or no")
    }
}

macro_rules! choices {
    ($($type:ty),*) => {$(
        impl Argument for $type {
            type Form = u32;
            type Abi = u32;
            #[inline]
            fn form(&self) -> u32 {
                self.code()
            }
            #[inline]
            fn abi(form: &u32) -> u32 {
                *form
            }
            #[inline]
            unsafe fn lift(abi: u32, _: Tags) -> Result<Self, Wrong> {
                Ok(choice(abi)?)
            }
        }
    )*};
}

choices!(AtomicsMode, BlasKind, CaptureMode, MathMode, Transport);

impl Answer for Completion {
    type Slot = u32;
    #[inline]
    fn empty() -> u32 {
        u32::MAX
    }
    #[inline]
    unsafe fn put(self, slot: *mut u32, _: Tags) -> Result<(), String> {
        // SAFETY: the caller ensures it.
        unsafe { put_plain(slot, self.code()) }
    }
    #[inline]
    fn lift(slot: u32, _: &Arc<Link>) -> Result<Self, String> {
        choice(slot)
    }
}

impl Argument for BlasOptions {
    type Form = u32;
    type Abi = u32;
    fn form(&self) -> u32 {
        self.kind.code()
    }
    fn abi(form: &u32) -> u32 {
        *form
    }
    unsafe fn lift(abi: u32, _: Tags) -> Result<Self, Wrong> {
        Ok(Self::new(choice(abi)?))
    }
}
