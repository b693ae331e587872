"""The tables and figures of the papers: trained, printed and drawn, ours beside published."""
