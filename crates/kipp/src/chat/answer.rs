//! An answer on its way to the terminal.

use anyhow::Result;
use text::thinking::Parts;
use text::{Begin, Message, Role, Thinking};

use crate::output::print;

/// Prints an answer as it grows: thoughts dimmed on a terminal and left out elsewhere.
pub struct Answer {
    thinking: Thinking,
    content: String,
    thought: String,
    dim: bool,
}

impl Answer {
    /// An answer that begins like this; `dim` if there is a terminal to show thoughts on.
    pub fn new(begin: Begin, dim: bool) -> Self {
        let (content, thought) = (String::new(), String::new());
        Answer { thinking: Thinking::new(begin), content, thought, dim }
    }

    /// Takes and prints more text; `last` if none will follow.
    pub fn grow(&mut self, text: &str, last: bool) -> Result<()> {
        let mut parts = Parts::default();
        self.thinking.push(text, &mut parts);
        if last {
            self.thinking.finish(&mut parts);
        }
        if !parts.reasoning.is_empty() && self.dim {
            print(&format!("\x1b[2m{}\x1b[0m", parts.reasoning))?;
        }
        if !parts.content.is_empty() {
            if self.content.is_empty() && !self.thought.is_empty() && self.dim {
                print("\n\n")?;
            }
            print(&parts.content)?;
        }
        self.thought += &parts.reasoning;
        self.content += &parts.content;
        Ok(())
    }

    /// What the conversation keeps of it.
    pub fn message(self) -> Message {
        let reasoning = Some(self.thought).filter(|thought| !thought.is_empty());
        Message { reasoning, ..Message::new(Role::Assistant, self.content) }
    }
}
