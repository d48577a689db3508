//! The KV pool: who holds which block, and which full blocks may be shared.
//!
//! The pool owns block *ids*; the bytes belong to the backend. A full block is published under a key
//! that is its content: the serial of the published block before it and its 32 tokens. Keys are
//! compared whole, so two different prefixes can never be mistaken for one another, whatever they hash
//! to. A serial is never used twice, so a chain whose head was evicted cannot be entered by accident.

use std::collections::{BTreeMap, HashMap};

use crate::batch::BLOCK;

/// Identity of a published block: unique for the life of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Serial(u64);

/// The serial before the first block of every sequence.
pub const ROOT: Serial = Serial(0);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    parent: Serial,
    tokens: [u32; BLOCK],
}

#[derive(Debug, Clone, Default)]
struct Block {
    holders: u32,
    published: Option<(Serial, Key)>,
    /// When the last holder let go, if published and idle.
    idle_since: u64,
}

/// Reference-counted KV blocks with a content-addressed prefix cache.
#[derive(Debug)]
pub struct KvPool {
    blocks: Vec<Block>,
    free: Vec<u32>,
    published: HashMap<Key, u32>,
    /// Published blocks that nobody holds, least recently used first.
    idle: BTreeMap<u64, u32>,
    clock: u64,
    serial: u64,
}

/// No block is free or evictable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exhausted;

impl KvPool {
    /// A pool of `blocks` free blocks.
    pub fn new(blocks: usize) -> Self {
        KvPool {
            blocks: vec![Block::default(); blocks],
            free: (0..blocks as u32).rev().collect(),
            published: HashMap::new(),
            idle: BTreeMap::new(),
            clock: 0,
            serial: 0,
        }
    }

    /// Blocks in all.
    pub fn capacity(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that an allocation could get: free ones, and idle published ones that it would evict.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Blocks that some sequence holds.
    pub fn held(&self) -> usize {
        self.capacity() - self.available()
    }

    /// Published blocks, held or idle.
    pub fn cached(&self) -> usize {
        self.published.len()
    }

    /// A block with one holder, contents undefined; evicts the least recently used idle block if none
    /// is free.
    pub fn allocate(&mut self) -> Result<u32, Exhausted> {
        let id = match self.free.pop() {
            Some(id) => id,
            None => {
                let (_, id) = self.idle.pop_first().ok_or(Exhausted)?;
                if let Some((_, key)) = self.blocks[id as usize].published.take() {
                    self.published.remove(&key);
                }
                id
            }
        };
        self.blocks[id as usize].holders = 1;
        Ok(id)
    }

    /// One more holder of a block that has some.
    pub fn share(&mut self, id: u32) {
        let block = &mut self.blocks[id as usize];
        assert!(block.holders > 0, "block {id} shared although nobody holds it");
        block.holders += 1;
    }

    /// One holder less. A published block stays findable until it is evicted.
    pub fn release(&mut self, id: u32) {
        let block = &mut self.blocks[id as usize];
        assert!(block.holders > 0, "block {id} released although nobody holds it");
        block.holders -= 1;
        if block.holders > 0 {
            return;
        }
        if block.published.is_some() {
            self.clock += 1;
            block.idle_since = self.clock;
            self.idle.insert(self.clock, id);
        } else {
            self.free.push(id);
        }
    }

    /// Whether writing to the block would be seen by another holder or by a later adopter.
    pub fn is_shared(&self, id: u32) -> bool {
        let block = &self.blocks[id as usize];
        block.holders > 1 || block.published.is_some()
    }

    /// Makes a full block findable after `parent`. If an equal block was published before, that one
    /// stays the findable one, and its serial continues the chain.
    pub fn publish(&mut self, parent: Serial, tokens: &[u32; BLOCK], id: u32) -> Serial {
        let key = Key { parent, tokens: *tokens };
        if let Some(&existing) = self.published.get(&key) {
            return self.serial_of(existing);
        }
        if let Some((_, old)) = &self.blocks[id as usize].published {
            assert_eq!(old, &key, "block {id} published twice with different contents");
        }
        self.serial += 1;
        let serial = Serial(self.serial);
        self.blocks[id as usize].published = Some((serial, key.clone()));
        self.published.insert(key, id);
        serial
    }

    /// Takes hold of the published block that follows `parent` with these tokens, if there is one.
    pub fn adopt(&mut self, parent: Serial, tokens: &[u32; BLOCK]) -> Option<(u32, Serial)> {
        let &id = self.published.get(&Key { parent, tokens: *tokens })?;
        let block = &mut self.blocks[id as usize];
        if block.holders == 0 {
            self.idle.remove(&block.idle_since);
        }
        block.holders += 1;
        Some((id, self.serial_of(id)))
    }

    /// Forgets every published block: their contents can no longer be trusted.
    pub fn forget(&mut self) {
        for block in &mut self.blocks {
            block.published = None;
        }
        self.published.clear();
        self.free.extend(std::mem::take(&mut self.idle).into_values());
    }

    fn serial_of(&self, id: u32) -> Serial {
        self.blocks[id as usize].published.as_ref().map_or(ROOT, |(serial, _)| *serial)
    }
}
