//! What the engine tells about itself.

/// How full the engine is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests being evaluated.
    pub running: usize,
    /// Requests waiting for a place or for blocks.
    pub waiting: usize,
    /// KV blocks that running requests hold.
    pub blocks_held: usize,
    /// KV blocks in all.
    pub blocks: usize,
    /// Times a request had to give its blocks back.
    pub preemptions: u64,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Prompt tokens found there.
    pub prefix_hits: u64,
    /// Forward passes.
    pub steps: u64,
    /// Tokens that were drafted and checked.
    pub drafted: u64,
    /// How many of those were right.
    pub accepted: u64,
}
