//! Reading and rendering any chat request.

use model::{Marker, Variant};
use text::chat::{Conversation, Ending, Role};
use text::{Tokenizer, json};

/// Input: JSON.
pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(value) = json::strict(text) {
        let mut once = String::new();
        json::write_python(value, &mut once).expect("strict JSON can be written");
        // Python writes infinities, which JSON does not know.
        if !once.contains("Infinity") {
            let mut twice = String::new();
            let value = json::strict(&once).expect("what is written is strict");
            json::write_python(value, &mut twice).expect("and can be written");
            assert_eq!(twice, once);
        }
    }
    let Ok(conversation) = Conversation::parse(text) else { return };
    for variant in [Variant::Instruct, Variant::Instruct2507, Variant::Thinking2507] {
        let Ok(prompt) = conversation.render(variant) else {
            assert!(conversation.messages.is_empty() || conversation.ending == Ending::Continue);
            continue;
        };
        let tokenizer = Tokenizer::tiny();
        let ids = prompt.encode(tokenizer);
        if prompt.text().is_ascii() {
            assert_eq!(tokenizer.decode(&ids, false), prompt.text());
        }
        // Nothing that a message says opens a turn: results that follow one another share theirs.
        let messages = &conversation.messages;
        let shared = messages.windows(2).filter(|m| m.iter().all(|m| m.role == Role::Tool)).count();
        let tools = !conversation.tools.is_empty() && messages[0].role != Role::System;
        let answer = conversation.ending == Ending::Answer;
        let turns = messages.len() - shared + usize::from(tools) + usize::from(answer);
        let opened = ids.iter().filter(|&&id| id == tokenizer.vocabulary().id(Marker::ImStart));
        assert_eq!(opened.count(), turns);
    }
}
