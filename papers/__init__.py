"""What repeats and studies the papers: tables, figures, studies and rival methods. It stands on the package sfumato."""
