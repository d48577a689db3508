//! What a hub or a disk may say of a checkpoint: a listing, an index of shards, the journal of a download.

use hub::pull::{Listing, parse_journal};

/// Input: a byte that says what it is, then the text.
pub fn run(data: &[u8]) {
    let [kind, text @ ..] = data else { return };
    match kind % 3 {
        0 => {
            let Ok(listing) = Listing::parse(text) else { return };
            for remote in [listing.weights(), listing.find("config.json")].into_iter().flatten() {
                assert!(is_plain(&remote.name));
            }
            let _ = listing.shards(text);
        }
        1 => {
            let known =
                br#"[{"type":"file","path":"a","size":1},{"type":"file","path":"b","size":2}]"#;
            let listing = Listing::parse(known).expect("sound");
            let Ok(shards) = listing.shards(text) else { return };
            assert!(shards.iter().all(|shard| ["a", "b"].contains(&&*shard.name)));
        }
        _ => {
            const SIZE: u64 = 1000;
            let Some((have, _)) = parse_journal(text, "kipp 1 1000 -\n", SIZE) else { return };
            let gaps = have.gaps(SIZE, 64);
            assert!(gaps.iter().all(|gap| !gap.is_empty() && gap.end <= SIZE));
            let missing: u64 = gaps.iter().map(|gap| gap.end - gap.start).sum();
            assert_eq!(have.bytes() + missing, SIZE);
            assert!(have.prefix() <= have.bytes());
        }
    }
}

fn is_plain(name: &str) -> bool {
    !name.is_empty() && name != ".." && !name.contains(['/', '\\', ':'])
}
