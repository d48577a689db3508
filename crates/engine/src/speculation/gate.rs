//! When drafts pay, and how long they should be: what steps took, held against what drafts bring.
//!
//! Drafts do not change an answer, so nothing here has to be right; it has to be quick and to come out
//! ahead. A step is judged by tokens a second. What a step costs is measured by the number of tokens in
//! its batch; what a draft brings is guessed from how earlier drafts of the same request fared. What was
//! measured long ago is believed less and less, so that a closed gate is tried again now and then.

/// Lengths that are considered: with the token before the draft they fill tiles of 2 to 16 tokens.
const DEPTHS: [usize; 5] = [1, 3, 7, 11, 15];
/// Longest draft.
pub const LONGEST: usize = 15;

/// How likely the next token of a request's draft is right, from drafts that were checked. Old checks
/// count less, and one check that is half right stands for what is not known.
#[derive(Debug, Clone, Copy, Default)]
pub struct Chance {
    right: f64,
    checked: f64,
}

impl Chance {
    /// Between 0 and 1.
    pub fn value(&self) -> f64 {
        (self.right + 0.5) / (self.checked + 1.0)
    }

    /// Of `drafted` tokens the first `accepted` were right; the one after them, if any, was wrong.
    pub fn learn(&mut self, drafted: usize, accepted: usize) {
        self.fade(0.9);
        self.right += accepted as f64;
        self.checked += (accepted + usize::from(accepted < drafted)) as f64;
    }

    /// A draft was not checked.
    pub fn doubt(&mut self) {
        self.fade(0.995);
    }

    fn fade(&mut self, by: f64) {
        self.right *= by;
        self.checked *= by;
    }
}

/// A draft that could be had.
#[derive(Debug, Clone, Copy)]
pub struct Offer {
    /// How likely each next token of it is right, if those before it are.
    pub chance: f64,
    /// Tokens.
    pub reach: usize,
}

impl Offer {
    /// Tokens that a draft of at most `depth` brings on average.
    fn gain(&self, depth: usize) -> f64 {
        let steps = depth.min(self.reach) as i32;
        (1..=steps).map(|step| self.chance.powi(step)).sum()
    }
}

/// Decides how long drafts are.
#[derive(Debug)]
pub struct Gate {
    /// Seconds of steps without drafts.
    plain: Costs,
    /// Seconds of steps that had drafts, making them included, or that waited to have some.
    drafting: Costs,
    /// Rate of drafting steps over that which they must beat, lately. Only asked where drafting costs the
    /// overlap of host and device.
    worth: f64,
    /// What a step with the gate closed adds to that, so that it is tried again.
    hope: f64,
}

/// How much faster drafts must seem to be had: what is measured is never exact.
const MARGIN: f64 = 1.03;

/// The most and the least hope: the gate is tried again after some ten or some hundred steps.
const HOPE: (f64, f64) = (5e-3, 2e-4);

impl Gate {
    /// A gate that has measured nothing and is open.
    pub fn new() -> Self {
        Gate { plain: Costs::default(), drafting: Costs::default(), worth: 2.0, hope: HOPE.0 }
    }

    /// The length of drafts, at most, that makes the next step of `sequences` requests yield the most
    /// tokens a second; `room` is how many tokens fit beside one for each request.
    pub fn depth(&mut self, sequences: usize, offers: &[Offer], room: usize) -> usize {
        let Some(plain) = self.plain.near(sequences) else {
            // Plain steps have to be seen first, and soon.
            self.worth = 0.98;
            return 0;
        };
        let plain_rate = sequences as f64 / plain;
        let mut best = (0, 0.0);
        for depth in [0].into_iter().chain(DEPTHS) {
            let drafts: usize = offers.iter().map(|offer| depth.min(offer.reach)).sum();
            if drafts > room {
                break;
            }
            let gain: f64 = offers.iter().map(|offer| offer.gain(depth)).sum();
            let seconds = self.drafting.estimate(sequences + drafts, (sequences, plain));
            let rate = (sequences as f64 + gain) / seconds;
            if rate > best.1 {
                best = (depth, rate);
            }
            // One unknown length at a time: what a bad guess costs grows with it.
            if drafts > 0 && self.drafting.near(sequences + drafts).is_none() {
                break;
            }
        }
        let worth = best.1 / (MARGIN * plain_rate);
        self.worth += 0.25 * (worth - self.worth);
        if worth > 1.0 {
            self.hope = HOPE.0;
            return best.0;
        }
        if !self.is_open() {
            self.worth = self.worth.min(0.95);
            self.hope = (self.hope / 2.0).max(HOPE.1);
        }
        if !offers.is_empty() {
            self.drafting.doubt();
        }
        0
    }

    /// Whether to give up, where it has to be given up, that the next step is submitted before the last
    /// one is read.
    pub fn is_open(&self) -> bool {
        self.worth >= 1.0
    }

    /// A step went by with the gate closed.
    pub fn wait(&mut self) {
        self.worth += self.hope;
    }

    /// What a step of this many tokens took; `drafting` if it had drafts or waited to have some.
    pub fn learn(&mut self, tokens: usize, drafting: bool, seconds: f64) {
        let costs = if drafting { &mut self.drafting } else { &mut self.plain };
        costs.learn(tokens, seconds);
    }
}

/// Seconds of a step by the number of its tokens.
#[derive(Debug)]
struct Costs(Vec<Cost>);

#[derive(Debug, Clone, Copy, Default)]
struct Cost {
    seen: bool,
    seconds: Option<f64>,
}

/// Numbers of tokens that are told apart; larger ones count as this.
const SIZES: usize = 512;

impl Default for Costs {
    fn default() -> Self {
        Costs(vec![Cost::default(); SIZES + 1])
    }
}

impl Costs {
    fn learn(&mut self, tokens: usize, seconds: f64) {
        let cost = &mut self.0[tokens.min(SIZES)];
        match &mut cost.seconds {
            // A first step may have to prepare what later ones find.
            None if !cost.seen => cost.seen = true,
            None => cost.seconds = Some(seconds),
            // What the machine does besides makes single steps slow, and never fast.
            Some(mean) => *mean += 0.3 * (seconds.min(2.0 * *mean) - *mean),
        }
    }

    fn doubt(&mut self) {
        self.0.iter_mut().filter_map(|cost| cost.seconds.as_mut()).for_each(|s| *s *= 0.999);
    }

    fn at(&self, tokens: usize) -> Option<f64> {
        self.0[tokens.min(SIZES)].seconds
    }

    /// What was measured, or what was at a number of tokens that is nearly the same.
    fn near(&self, tokens: usize) -> Option<f64> {
        (0..=tokens / 4).find_map(|off| self.at(tokens - off).or_else(|| self.at(tokens + off)))
    }

    /// What was measured, else what lies between the neighbours that were, the lower one being at least
    /// `anchor`; beyond all that was measured, no more than the largest: it will be tried and known.
    fn estimate(&self, tokens: usize, anchor: (usize, f64)) -> f64 {
        let tokens = tokens.min(SIZES);
        let known = |size: usize| Some((size, self.at(size)?));
        let below = (anchor.0..=tokens).rev().find_map(known).unwrap_or(anchor);
        match (tokens + 1..=SIZES).find_map(known) {
            Some(above) if tokens > below.0 => {
                let share = (tokens - below.0) as f64 / (above.0 - below.0) as f64;
                below.1 + share * (above.1 - below.1)
            }
            _ => below.1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine on which a step takes `fixed` and each of its tokens `each` more; `overlap` is what a step
    /// takes longer that waits for the last one to be read.
    struct Machine {
        fixed: f64,
        each: f64,
        overlap: f64,
    }

    /// Tokens a second with drafts of which each next token is right with this chance, and without.
    fn play(machine: &Machine, chance: f64, sequences: usize, steps: usize) -> (f64, f64) {
        let Machine { fixed, each, overlap } = *machine;
        let mut gate = Gate::new();
        let mut chances = vec![Chance::default(); sequences];
        let mut owed = vec![0.0; sequences];
        let (mut seconds, mut tokens) = (0.0, 0.0);
        for _ in 0..steps {
            let offers: Vec<Offer> =
                chances.iter().map(|c| Offer { chance: c.value(), reach: LONGEST }).collect();
            let waits = overlap > 0.0 && gate.is_open();
            let depth = if waits || overlap == 0.0 {
                gate.depth(sequences, &offers, 512 - sequences)
            } else {
                gate.wait();
                0
            };
            let mut took = fixed + each * (sequences * (1 + depth)) as f64;
            took += if waits { overlap } else { 0.0 };
            gate.learn(sequences * (1 + depth), depth > 0 || waits, took);
            seconds += took;
            for (chance_of, owed) in chances.iter_mut().zip(&mut owed) {
                tokens += 1.0;
                if depth == 0 {
                    chance_of.doubt();
                    continue;
                }
                // Every draft is right for as long as the fraction that is owed allows.
                *owed += chance / (1.0 - chance);
                let accepted = (*owed as usize).min(depth);
                *owed = (*owed - accepted as f64).min(1.0);
                chance_of.learn(depth, accepted);
                tokens += accepted as f64;
            }
        }
        let plain = sequences as f64 / (fixed + each * sequences as f64);
        (tokens / seconds, plain)
    }

    #[test]
    fn drafts_pay_where_a_step_waits_for_memory() {
        for (sequences, overlap) in [(1, 0.0), (4, 0.0), (1, 4e-3), (4, 4e-3)] {
            let machine = Machine { fixed: 20e-3, each: 1e-3, overlap };
            let (rate, plain) = play(&machine, 0.9, sequences, 500);
            assert!(rate > 2.0 * plain, "{sequences}, {overlap}: {rate} against {plain}");
        }
    }

    #[test]
    fn what_does_not_pay_costs_less_than_a_twentieth() {
        // Bad drafts, dear tokens, and both.
        for (fixed, each, chance) in
            [(20e-3, 1e-3, 0.02), (20e-3, 5e-3, 0.05), (0.0, 1e-3, 0.5), (1e-3, 1e-3, 0.3)]
        {
            for (sequences, overlap) in [(1, 0.0), (3, 0.0), (16, 0.0), (1, 5e-3), (16, 5e-3)] {
                let machine = Machine { fixed, each, overlap };
                let (rate, plain) = play(&machine, chance, sequences, 2000);
                let name = format!("{fixed} {each} {chance} x {sequences}, {overlap}");
                assert!(rate > 0.95 * plain, "{name}: {rate}, {plain}");
            }
        }
    }

    /// An answer of some hundred tokens has not the time to make up for a costly beginning. The machine is two
    /// cores with the 0.6B in q4_0.
    #[test]
    fn finding_out_that_nothing_pays_is_cheap() {
        for chance in [0.0, 0.05, 0.15] {
            let machine = Machine { fixed: 9e-3, each: 2.4e-3, overlap: 0.0 };
            let (rate, plain) = play(&machine, chance, 1, 160);
            assert!(rate > 0.96 * plain, "{chance}: {rate}, {plain}");
        }
    }

    #[test]
    fn a_closed_gate_is_tried_again() {
        let mut gate = Gate::new();
        for _ in 0..4 {
            gate.learn(1, false, 1.0);
            gate.learn(2, true, 5.0);
        }
        let offer = [Offer { chance: 0.9, reach: 1 }];
        assert_eq!(gate.depth(1, &offer, 100), 0);
        let waited = (0..).find(|_| gate.depth(1, &offer, 100) > 0).expect("a time");
        assert!((300..3000).contains(&waited), "{waited}");
    }
}
