//! The pool against a model that keeps every block's contents: random sequences grow, fork, shrink,
//! publish and adopt, and at no time may a block be lost, freed twice, or seen by someone it does not
//! belong to.

use std::collections::HashMap;

use engine::batch::BLOCK;
use engine::kv::KvPool;
use engine::philox::philox;
use engine::{Batch, Input, Sequence};

struct Dice(u32);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 += 1;
        philox(99, [self.0, 0, 0, 0])[0] as usize % sides
    }
}

/// What a backend would hold: the token written to each slot of each block.
type Memory = HashMap<(u32, usize), u32>;

/// Writes a batch as a backend would.
fn write(memory: &mut Memory, batch: &Batch) {
    for &(from, to) in &batch.copies {
        for slot in 0..BLOCK {
            if let Some(&token) = memory.get(&(from, slot)) {
                memory.insert((to, slot), token);
            }
        }
    }
    for s in 0..batch.sequences() {
        for t in batch.offsets[s]..batch.offsets[s + 1] {
            let Input::Token(token) = batch.tokens[t] else { panic!("no references here") };
            let position = batch.positions[t] as usize;
            let block = batch.tables[s][position / BLOCK];
            memory.insert((block, position % BLOCK), token);
        }
    }
}

/// Evaluates up to `count` tokens and checks that the sequence sees exactly its own tokens.
fn evaluate(seq: &mut Sequence, pool: &mut KvPool, memory: &mut Memory, count: usize) -> bool {
    let count = count.min(seq.pending());
    if count == 0 {
        return true;
    }
    let mut batch = Batch::default();
    if seq.schedule(pool, &mut batch, count).is_err() {
        return false;
    }
    write(memory, &batch);
    let table = &batch.tables[0];
    for (position, token) in seq.tokens()[..seq.evaluated()].iter().enumerate() {
        let found = memory.get(&(table[position / BLOCK], position % BLOCK));
        assert_eq!(found, Some(token), "position {position} of {:?}", seq.tokens());
    }
    true
}

#[test]
fn random_lives_of_sequences() {
    let blocks = 6;
    let mut adopted = 0;
    let mut exhausted = 0;
    for round in 0..40 {
        let mut dice = Dice(round * 100_000);
        let mut pool = KvPool::new(blocks);
        let mut memory = Memory::new();
        let mut alive: Vec<Sequence> = Vec::new();
        for _ in 0..600 {
            match dice.roll(8) {
                // Few distinct prompts, so that prefixes repeat.
                0 | 1 if alive.len() < 8 => {
                    let len = 1 + dice.roll(100);
                    let flavour = dice.roll(3) as u32;
                    let cut = dice.roll(100);
                    let token = |i: usize| if i < cut { flavour } else { 7 + i as u32 % 2 };
                    let mut seq = Sequence::new((0..len).map(token).collect());
                    adopted += seq.adopt(&mut pool);
                    alive.push(seq);
                }
                2 | 3 if !alive.is_empty() => {
                    let i = dice.roll(alive.len());
                    let count = 1 + dice.roll(50);
                    if !evaluate(&mut alive[i], &mut pool, &mut memory, count) {
                        exhausted += 1;
                    }
                }
                4 if !alive.is_empty() => {
                    let i = dice.roll(alive.len());
                    alive[i].publish(&mut pool);
                }
                5 if !alive.is_empty() && alive.len() < 8 => {
                    let i = dice.roll(alive.len());
                    let mut fork = alive[i].fork(&mut pool);
                    fork.append(&[100 + dice.roll(3) as u32]);
                    alive.push(fork);
                }
                6 if !alive.is_empty() => {
                    let i = dice.roll(alive.len());
                    let len = dice.roll(alive[i].tokens().len() + 1);
                    alive[i].truncate(&mut pool, len);
                    alive[i].append(&[200 + dice.roll(3) as u32]);
                }
                7 if !alive.is_empty() => {
                    let i = dice.roll(alive.len());
                    alive.swap_remove(i).release(&mut pool);
                }
                _ => {}
            }
            assert_eq!(pool.available() + pool.held(), blocks);
        }
        alive.drain(..).for_each(|mut seq| seq.release(&mut pool));
        assert_eq!(pool.held(), 0, "blocks lost in round {round}");
        assert_eq!(pool.available(), blocks);
        // Every block can be had again, each once.
        let mut all: Vec<u32> = (0..blocks).map(|_| pool.allocate().expect("free")).collect();
        all.sort_unstable();
        assert_eq!(all, (0..blocks as u32).collect::<Vec<_>>());
        assert!(pool.allocate().is_err());
    }
    assert!(
        adopted > 1000 && exhausted > 100,
        "adopted {adopted}, exhausted {exhausted}: too tame"
    );
}

#[test]
fn a_whole_cached_prompt_leaves_one_block_to_evaluate() {
    let mut pool = KvPool::new(8);
    let mut memory = Memory::new();
    for len in [31, 32, 33, 63, 64, 65] {
        let tokens: Vec<u32> = (0..len).collect();
        let mut first = Sequence::new(tokens.clone());
        first.adopt(&mut pool);
        assert!(evaluate(&mut first, &mut pool, &mut memory, 999));
        first.publish(&mut pool);
        let mut second = Sequence::new(tokens);
        second.adopt(&mut pool);
        assert!(second.pending() >= 1, "length {len}");
        assert_eq!(second.evaluated(), (len as usize - 1) / BLOCK * BLOCK);
        first.release(&mut pool);
        second.release(&mut pool);
    }
}

#[test]
fn least_recently_used_prefixes_go_first() {
    let mut pool = KvPool::new(3);
    let mut memory = Memory::new();
    let run = |flavour: u32, pool: &mut KvPool, memory: &mut Memory| {
        let mut seq = Sequence::new(vec![flavour; BLOCK + 1]);
        let gained = seq.adopt(pool);
        seq.truncate(pool, BLOCK);
        assert!(evaluate(&mut seq, pool, memory, BLOCK));
        seq.publish(pool);
        seq.release(pool);
        gained
    };
    assert_eq!([1, 2, 3].map(|f| run(f, &mut pool, &mut memory)), [0, 0, 0]);
    assert_eq!(run(1, &mut pool, &mut memory), BLOCK, "still there, and used just now");
    assert_eq!(run(4, &mut pool, &mut memory), 0, "evicts 2");
    assert_eq!(run(1, &mut pool, &mut memory), BLOCK);
    assert_eq!(run(2, &mut pool, &mut memory), 0, "was evicted");
}

#[test]
fn forgetting_makes_idle_blocks_free() {
    let mut pool = KvPool::new(2);
    let mut memory = Memory::new();
    let mut seq = Sequence::new(vec![5; BLOCK]);
    assert!(evaluate(&mut seq, &mut pool, &mut memory, BLOCK));
    seq.publish(&mut pool);
    seq.release(&mut pool);
    assert_eq!(pool.cached(), 1);
    pool.forget();
    assert_eq!((pool.cached(), pool.available()), (0, 2));
    assert_eq!(Sequence::new(vec![5; BLOCK + 1]).adopt(&mut pool), 0);
}
