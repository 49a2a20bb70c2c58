A='1 # 2' B="x  $A"
trl "$B" a/b#c '' "" \$A "\$A \\ \x" 'it'"'"'s' # no
