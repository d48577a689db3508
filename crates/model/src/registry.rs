//! The one table of checkpoints that kipp runs, each pinned to an upstream revision.

use crate::spec::Spec;
use crate::vocabulary::{FAMILY_ROWS, Marker, TINY_ROWS, Vocabulary};

/// Which chat behaviour a checkpoint was trained for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// Pretrained only: no chat template.
    Base,
    /// Hybrid thinking, switched by `enable_thinking`.
    Instruct,
    /// Never thinks.
    Instruct2507,
    /// Always thinks; the template opens the `<think>` block itself.
    Thinking2507,
}

impl Variant {
    /// Tokens that end an answer; the first is the file's end-of-sequence token.
    pub const fn stops(self) -> &'static [Marker] {
        match self {
            Variant::Base => &[Marker::EndOfText],
            Variant::Instruct | Variant::Instruct2507 | Variant::Thinking2507 => {
                &[Marker::ImEnd, Marker::EndOfText]
            }
        }
    }
}

/// A pinned checkpoint.
#[derive(Debug, PartialEq)]
pub struct Checkpoint {
    /// Name on the command line, e.g. `qwen3-4b`.
    pub id: &'static str,
    /// Upstream repository; for kipp-tiny this project.
    pub repository: &'static str,
    /// Pinned commit of the repository; for kipp-tiny the SHA-256 of its safetensors file.
    pub revision: &'static str,
    /// Dimensions.
    pub spec: Spec,
    /// Chat behaviour, which also fixes the stop tokens.
    pub variant: Variant,
}

impl Checkpoint {
    /// The checkpoint with this id.
    pub fn find(id: &str) -> Option<&'static Self> {
        CHECKPOINTS.iter().find(|checkpoint| checkpoint.id == id)
    }

    /// All checkpoints with these dimensions. Only the two of the 2507 release share theirs.
    pub fn with_spec(spec: &Spec) -> impl Iterator<Item = &'static Self> {
        CHECKPOINTS.iter().filter(move |checkpoint| checkpoint.spec == *spec)
    }

    /// The checkpoint's name as its publisher writes it, e.g. `Qwen3-4B`.
    pub fn name(&self) -> &'static str {
        self.repository.rsplit('/').next().unwrap_or(self.repository)
    }

    /// The tokens of this checkpoint.
    pub fn vocabulary(&self) -> &'static Vocabulary {
        Vocabulary::of(&self.spec).expect("every registered checkpoint has a vocabulary")
    }

    /// Ids that end an answer; the first is the file's end-of-sequence token.
    pub fn stops(&self) -> Vec<u32> {
        self.variant.stops().iter().map(|&marker| self.vocabulary().id(marker)).collect()
    }
}

/// Every checkpoint kipp runs.
#[rustfmt::skip]
pub static CHECKPOINTS: [Checkpoint; 14] = [
    base("qwen3-0.6b-base", "Qwen/Qwen3-0.6B-Base", "da87bfb608c14b7cf20ba1ce41287e8de496c0cd", SMALLEST),
    hybrid("qwen3-0.6b", "Qwen/Qwen3-0.6B", "c1899de289a04d12100db370d81485cdf75e47ca", SMALLEST),
    base("qwen3-1.7b-base", "Qwen/Qwen3-1.7B-Base", "ea980cb0a6c2ae4b936e82123acc929f1cec04c1", SMALL),
    hybrid("qwen3-1.7b", "Qwen/Qwen3-1.7B", "70d244cc86ccca08cf5af4e1e306ecf908b1ad5e", SMALL),
    base("qwen3-4b-base", "Qwen/Qwen3-4B-Base", "906bfd4b4dc7f14ee4320094d8b41684abff8539", MEDIUM),
    hybrid("qwen3-4b", "Qwen/Qwen3-4B", "1cfa9a7208912126459214e8b04321603b3df60c", MEDIUM),
    Checkpoint {
        id: "qwen3-4b-instruct-2507",
        repository: "Qwen/Qwen3-4B-Instruct-2507",
        revision: "cdbee75f17c01a7cc42f958dc650907174af0554",
        spec: Spec { context: 262_144, theta: 5e6, ..MEDIUM },
        variant: Variant::Instruct2507,
    },
    Checkpoint {
        id: "qwen3-4b-thinking-2507",
        repository: "Qwen/Qwen3-4B-Thinking-2507",
        revision: "768f209d9ea81521153ed38c47d515654e938aea",
        spec: Spec { context: 262_144, theta: 5e6, ..MEDIUM },
        variant: Variant::Thinking2507,
    },
    base("qwen3-8b-base", "Qwen/Qwen3-8B-Base", "49e3418fbbbca6ecbdf9608b4d22e5a407081db4", LARGE),
    hybrid("qwen3-8b", "Qwen/Qwen3-8B", "b968826d9c46dd6066d109eabc6255188de91218", LARGE),
    base("qwen3-14b-base", "Qwen/Qwen3-14B-Base", "0b0bd3732e2c374d483664439ea334928b65f304", LARGER),
    hybrid("qwen3-14b", "Qwen/Qwen3-14B", "40c069824f4251a91eefaf281ebe4c544efd3e18", LARGER),
    hybrid("qwen3-32b", "Qwen/Qwen3-32B", "9216db5781bf21249d130ec9da846c4624c16137", LARGEST),
    Checkpoint {
        id: "kipp-tiny",
        repository: "kipp-tiny",
        revision: "314f47eac6dff2f99febdd092b6653c0dc403595ef25d393a9cf7ed36a1e4ef5",
        spec: Spec {
            layers: 6, hidden: 256, ffn: 768, heads: 16, vocab: TINY_ROWS, context: 2_048, theta: 1e6, tied: true,
        },
        variant: Variant::Instruct,
    },
];

/// Dimensions by size, with the context of the hybrid checkpoints.
const SMALLEST: Spec = qwen(28, 1024, 3072, 16, true);
const SMALL: Spec = qwen(28, 2048, 6144, 16, true);
const MEDIUM: Spec = qwen(36, 2560, 9728, 32, true);
const LARGE: Spec = qwen(36, 4096, 12_288, 32, false);
const LARGER: Spec = qwen(40, 5120, 17_408, 40, false);
const LARGEST: Spec = qwen(64, 5120, 25_600, 64, false);

const fn qwen(layers: usize, hidden: usize, ffn: usize, heads: usize, tied: bool) -> Spec {
    Spec { layers, hidden, ffn, heads, vocab: FAMILY_ROWS, context: 40_960, theta: 1e6, tied }
}

const fn hybrid(
    id: &'static str,
    repository: &'static str,
    revision: &'static str,
    spec: Spec,
) -> Checkpoint {
    Checkpoint { id, repository, revision, spec, variant: Variant::Instruct }
}

const fn base(
    id: &'static str,
    repository: &'static str,
    revision: &'static str,
    spec: Spec,
) -> Checkpoint {
    let spec = Spec { context: 32_768, ..spec };
    Checkpoint { id, repository, revision, spec, variant: Variant::Base }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_unique_and_revisions_are_pinned() {
        for (i, checkpoint) in CHECKPOINTS.iter().enumerate() {
            assert!(std::ptr::eq(Checkpoint::find(checkpoint.id).unwrap(), &CHECKPOINTS[i]));
            let digits = if checkpoint.id == "kipp-tiny" { 64 } else { 40 };
            assert_eq!(checkpoint.revision.len(), digits);
            assert!(checkpoint.revision.bytes().all(|b| b.is_ascii_hexdigit()));
        }
        assert_eq!(Checkpoint::find("qwen3-5b"), None);
    }

    #[test]
    fn dimensions_tell_all_but_the_2507_pair_apart() {
        for checkpoint in &CHECKPOINTS {
            let twins = Checkpoint::with_spec(&checkpoint.spec).count();
            assert_eq!(twins, if checkpoint.id.ends_with("-2507") { 2 } else { 1 });
        }
    }

    #[test]
    fn stops_follow_the_variant() {
        let stops = |id| Checkpoint::find(id).unwrap().stops();
        assert_eq!(stops("qwen3-8b-base"), [151_643]);
        assert_eq!(stops("qwen3-8b"), [151_645, 151_643]);
        assert_eq!(stops("qwen3-4b-thinking-2507"), [151_645, 151_643]);
        assert_eq!(stops("kipp-tiny"), [8_168, 8_166]);
    }
}
