trl ~/a "~/a" $HOME/b a~ ~
