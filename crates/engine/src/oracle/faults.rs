//! Where the study of the gates (`conformance/study.rs`) plants mistakes into the oracle. Outside of the
//! crate's own tests nothing can be planted, and every function gives back what it was given.

/// What is wrong with this oracle.
#[derive(Debug, Clone, Copy, Default)]
pub struct Faults {
    #[cfg(test)]
    pub planted: Option<Fault>,
}

/// A mistake of somebody who writes kernels.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Neighbouring slots of a block are exchanged on the way in.
    SlotOrder,
    /// Keys are stored as values, and values as keys.
    SwappedKv,
    /// Rotary positions are counted from the beginning of the call.
    RopePosition,
    /// From the ninth token of a call on, attention leaves what was there before.
    StaleScratch,
    /// The last sixteen outputs of a matrix are not computed.
    DroppedTail,
    /// A token does not see itself.
    MaskShort,
    /// A token sees the position behind it.
    MaskLong,
}

#[cfg(test)]
impl Faults {
    fn is(self, fault: Fault) -> bool {
        self.planted == Some(fault)
    }

    pub fn stored<'a>(
        self,
        at: usize,
        k: &'a [f32],
        v: &'a [f32],
    ) -> (usize, &'a [f32], &'a [f32]) {
        let (k, v) = if self.is(Fault::SwappedKv) { (v, k) } else { (k, v) };
        (at ^ usize::from(self.is(Fault::SlotOrder)), k, v)
    }

    pub fn turned(self, position: u32, first: u32) -> u32 {
        if self.is(Fault::RopePosition) { position.saturating_sub(first) } else { position }
    }

    pub fn skips(self, token: usize) -> bool {
        self.is(Fault::StaleScratch) && token >= 8
    }

    pub fn visible(self, length: usize, room: usize) -> usize {
        let short = usize::from(self.is(Fault::MaskShort) && length > 1);
        let long = usize::from(self.is(Fault::MaskLong) && length < room);
        length + long - short
    }

    pub fn product(self, out: &mut [f32], width: usize) {
        if self.is(Fault::DroppedTail) {
            out.chunks_exact_mut(width).for_each(|row| row[width - 16..].fill(0.0));
        }
    }
}

#[cfg(not(test))]
impl Faults {
    /// Where a position's keys and values go.
    pub fn stored<'a>(
        self,
        at: usize,
        k: &'a [f32],
        v: &'a [f32],
    ) -> (usize, &'a [f32], &'a [f32]) {
        (at, k, v)
    }

    /// The rotary position of a token in a call that begins at `first`.
    pub fn turned(self, position: u32, _first: u32) -> u32 {
        position
    }

    /// Whether a token of a call does without attention.
    pub fn skips(self, _token: usize) -> bool {
        false
    }

    /// How many positions a token sees.
    pub fn visible(self, length: usize, _room: usize) -> usize {
        length
    }

    /// What a matrix has computed.
    pub fn product(self, _out: &mut [f32], _width: usize) {}
}
