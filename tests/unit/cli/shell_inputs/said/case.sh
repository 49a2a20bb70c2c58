M=qwen-7b
case $M in
 llama*) N=1;;
 *7b|*8b) N=2;;
 *) N=3;;
esac
case "$M" in "*") K=1;; [!a-p]*) K=2;; esac
trl $N $K
