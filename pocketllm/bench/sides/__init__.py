"""What is measured side by side: PocketLLM and its peers, each in a process of its own."""
