//! A model whose shapes fill nothing.

use model::Spec;

/// Small enough for the oracle; widths that are multiples of 32 and of nothing larger, five query heads a KV head, and
/// a vocabulary that fills no panel.
pub const RAGGED: Spec = Spec {
    layers: 2,
    hidden: 160,
    ffn: 352,
    heads: 40,
    vocab: 331,
    context: 2048,
    theta: 1e6,
    tied: false,
};
